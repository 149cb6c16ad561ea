"""Makes a schedule for the steps of a graph."""

from __future__ import annotations

from roundpipe_fx.schedules import (
    ActionKind,
    InvalidScheduleError,
    Schedule,
    ScheduleSpec,
    StageGraph,
    StepCosts,
    with_recompute,
)

__all__ = ["make_schedule"]


def make_schedule(spec: ScheduleSpec, graph: StageGraph, costs: StepCosts, devices: int, microbatches: int) -> Schedule:
    """A schedule that runs all steps of a graph, each stage's recomputation before the wait for its gradient.

    Args:
        spec: how it is built.
        graph: the steps; those that the schedule knows and the graph does not (a stage without parameters has no
            gradients of them) are left out. Of a schedule that was written for its stages only the halves of backwards
            are, since everything else is a mistake that is to be named.
        costs: of the steps; how stages are dispatched depends on them.
        devices: how many.
        microbatches: how many.

    Raises:
        InvalidScheduleError: backwards are split though the specification says that they are not, or the reverse.
    """
    stages = 1 + max((stage for kind, stage in graph.steps if kind is ActionKind.FORWARD), default=0)
    if spec.dispatches:
        slots = 1 + max((stage for _, stage in graph.steps), default=0)
        seconds = [0.0] * slots
        for (_, slot), of_slot in costs.seconds.items():
            seconds[slot] += of_slot
        once = costs.on_host is not None
        made = spec.build(devices, stages, microbatches, slots=slots, seconds=seconds, once=once)
    else:
        made = spec.build(devices, stages, microbatches)
    if spec.stages is not None:
        return with_recompute(made.without_missing_halves(graph), graph)
    _check_halves(spec, made)
    return with_recompute(made.restricted(graph), graph)


def _check_halves(spec: ScheduleSpec, made: Schedule) -> None:
    others = (ActionKind.BACKWARD,) if spec.splits_backward else (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    if made.only(*others).size:
        raise InvalidScheduleError(
            f"schedule {spec.name!r} is built with actions of kind {', '.join(others)}, and its specification says "
            f"splits_backward={spec.splits_backward}: a backward is either B, or split into I and W."
        )
