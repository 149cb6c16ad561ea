"""Recomputation is scheduled before the wait for the incoming gradient, so that it fills the wait."""

from __future__ import annotations

import dataclasses

import numpy as np

from roundpipe_fx.schedules.action import ActionKind
from roundpipe_fx.schedules.schedule import NUMBER, Schedule
from roundpipe_fx.schedules.stage_graph import StageGraph

__all__ = ["with_recompute"]


def with_recompute(schedule: Schedule, graph: StageGraph) -> Schedule:
    """Insert each stage's recomputation directly before its backward, if the schedule contains none.

    The backward waits for the gradient of the next stage; the recomputation does not, so it runs while the device
    waits.

    Args:
        schedule: the schedule.
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
        places = np.flatnonzero(np.isin(order[:, 0] << 20 | order[:, 1], before))
        added = order[places].copy()
        added[:, 0] = recompute
        orders.append(np.insert(order, places, added, axis=0))
    return dataclasses.replace(schedule, orders=tuple(orders))
