"""Schedules for the steps of a graph: built as specified, and completed.

Recomputation is scheduled before the wait for the incoming gradient, so that it fills the wait.

Sends and receives are derived from which stage action reads which. After an action, its results are sent directly to
every device that runs a reader of them, whatever its stage; so values that skip stages are sent once, and not through
the stages between. A device receives just before its first reader runs.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from roundpipe_fx.schedules.action import Action, ActionKind, StageAction
from roundpipe_fx.schedules.spec import ScheduleSpec
from roundpipe_fx.schedules.stage_graph import StageGraph
from roundpipe_fx.schedules.step_costs import StepCosts
from roundpipe_fx.schedules.timetable import NUMBER, Schedule
from roundpipe_fx.schedules.validate import InvalidScheduleError


def make_schedule(spec: ScheduleSpec, graph: StageGraph, costs: StepCosts, devices: int, microbatches: int) -> Schedule:
    """A schedule that runs all steps of a graph, each stage's recomputation before the wait for its gradient.

    Args:
        spec: how it is built.
        graph: the steps; those that the schedule knows and the graph does not (a stage without parameters has no
            gradients of them) are left out. Of a schedule that was written for its stages only the halves of backwards
            are, since everything else is a mistake that is to be named.
        costs: of the steps; how stages are dispatched depends on them.

    Raises:
        InvalidScheduleError: backwards are split though the specification says that they are not, or the reverse.
    """
    stages = 1 + max((stage for kind, stage in graph.steps if kind is ActionKind.FORWARD), default=0)
    # Dispatched schedules are built from seconds, since slots are assigned to workers that become free.
    if spec.dispatches:
        slots = 1 + max((stage for _, stage in graph.steps), default=0)
        seconds = [0.0] * slots
        for (_, slot), of_slot in costs.seconds.items():
            seconds[slot] += of_slot
        once = costs.on_host is not None
        schedule = spec.build(devices, stages, microbatches, slots=slots, seconds=seconds, once=once)
    else:
        schedule = spec.build(devices, stages, microbatches)
    # A user's schedule is for a fixed number of stages and may name halves that a stage does not have.
    if spec.stages is not None:
        return with_recompute(schedule.without_missing_halves(graph), graph)
    _check_halves(spec, schedule)
    return with_recompute(schedule.restricted(graph), graph)


def _check_halves(spec: ScheduleSpec, schedule: Schedule) -> None:
    others = (ActionKind.BACKWARD,) if spec.splits_backward else (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    if schedule.only(*others).size:
        raise InvalidScheduleError(
            f"schedule {spec.name!r} is built with actions of kind {', '.join(others)}, and its specification says "
            f"splits_backward={spec.splits_backward}: a backward is either B, or split into I and W."
        )


def with_recompute(schedule: Schedule, graph: StageGraph) -> Schedule:
    """Insert each stage's recomputation directly before its backward, if the schedule contains none.

    The backward waits for the gradient of the next stage; the recomputation does not, so it runs while the device
    waits.

    Args:
        graph: the stage actions that exist.

    Returns:
        the schedule with the recomputations inserted.
    """
    stages = [stage for kind, stage in graph.steps if kind is ActionKind.RECOMPUTE]
    recompute = NUMBER[ActionKind.RECOMPUTE]
    if not stages or any((order[:, 0] == recompute).any() for order in schedule.orders):
        return schedule
    # The last stage of the backward may compute gradients of parameters only.
    first = {
        stage: next(
            k
            for k in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
            if graph.has(k, stage)
        )
        for stage in stages
    }
    before = np.array([NUMBER[kind] << 20 | stage for stage, kind in first.items()], dtype=np.int32)
    orders = []
    for order in schedule.orders:
        # Kind and stage as one number, compared for all actions at once.
        positions = np.flatnonzero(np.isin(order[:, 0] << 20 | order[:, 1], before))
        added = order[positions].copy()
        added[:, 0] = recompute
        orders.append(np.insert(order, positions, added, axis=0))
    return dataclasses.replace(schedule, orders=tuple(orders))


def with_transfers(schedule: Schedule, graph: StageGraph) -> list[list[Action]]:
    """Each device's actions, with sends and receives inserted.

    Args:
        graph: which stage action reads which.
    """
    orders = [schedule.actions(device) for device in range(schedule.devices)]
    where = {(action.step, action.microbatch): device for device, order in enumerate(orders) for action in order}
    readers: dict[StageAction, list[StageAction]] = {}
    for step, sources in graph.reads.items():
        for source in sources:
            readers.setdefault(source, []).append(step)
    full = []
    for device, order in enumerate(orders):
        actions: list[Action] = []
        received: set[tuple[StageAction, int]] = set()
        for action in order:
            batch = action.microbatch
            for source in graph.reads[action.step]:
                peer = where.get((source, batch), device)
                if peer != device and (source, batch) not in received:
                    # A value is received once per device, before its first reader there.
                    received.add((source, batch))
                    actions.append(Action(ActionKind.RECEIVE, source[1], batch, source[0], peer))
            actions.append(action)
            # Sent right behind its maker, to every device that reads it.
            peers = {where.get((reader, batch), device) for reader in readers.get(action.step, ())} - {device}
            actions += [Action(ActionKind.SEND, action.stage, batch, action.kind, peer) for peer in sorted(peers)]
        full.append(actions)
    return full
