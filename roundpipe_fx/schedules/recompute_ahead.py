"""Recomputation before the gradient arrives: it stands just before the wait for the gradient, not after it."""

from __future__ import annotations

import dataclasses

import numpy as np

from roundpipe_fx.schedules.action import ActionKind
from roundpipe_fx.schedules.schedule import NUMBER, Schedule
from roundpipe_fx.schedules.stage_graph import StageGraph

__all__ = ["with_recompute"]


def with_recompute(schedule: Schedule, graph: StageGraph) -> Schedule:
    """Put each stage's recomputation directly before its backward, where the schedule has none.

    The backward waits for the gradient of the next stage; the recomputation does not, so it runs while the device
    waits.
    """
    stages = [stage for kind, stage in graph.steps if kind is ActionKind.RECOMPUTE]
    recompute = NUMBER[ActionKind.RECOMPUTE]
    if not stages or any((order[:, 0] == recompute).any() for order in schedule.orders):
        return schedule
    # The stage with which the backward ends may have gradients of parameters alone.
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
