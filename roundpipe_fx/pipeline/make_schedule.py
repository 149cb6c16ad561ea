"""Makes the schedule of a name for the steps of a graph."""

from __future__ import annotations

from collections.abc import Callable

from roundpipe_fx.schedules import (
    ActionKind,
    Schedule,
    StageGraph,
    StepCosts,
    gpipe,
    interleaved,
    one_f_one_b,
    round_robin,
    with_recompute,
    zero_bubble,
)

__all__ = ["make_schedule"]

_BOUND: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}


def make_schedule(name: str, graph: StageGraph, costs: StepCosts, devices: int, microbatches: int) -> Schedule:
    """A schedule that runs all steps of a graph, each stage's recomputation before the wait for its gradient.

    Args:
        name: of :data:`roundpipe_fx.pipeline.settings.SCHEDULES`.
        graph: the steps; those that the schedule knows and the graph does not (a stage without parameters has no
            gradients of them) are left out.
        costs: of the steps; RoundPipe's dispatch depends on them.
        devices: how many.
        microbatches: how many.
    """
    stages = 1 + max((stage for kind, stage in graph.steps if kind is ActionKind.FORWARD), default=0)
    if name == "roundpipe":
        slots = 1 + max((stage for _, stage in graph.steps), default=0)
        seconds = [0.0] * slots
        for (_, slot), of_slot in costs.seconds.items():
            seconds[slot] += of_slot
        whole = round_robin(devices, stages - 1, slots, microbatches, seconds, costs.on_host is not None)
    else:
        whole = _BOUND[name](devices, stages, microbatches)
    return with_recompute(whole.restricted(graph), graph)
