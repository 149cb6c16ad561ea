"""Segments of an offloaded model as the planner sees them: weights beside their saved values, and which of these may
leave."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from roundpipe_fx.ir.segment import StageCut, backward_stages
from roundpipe_fx.pipeline.runs import microbatches_in_flight
from roundpipe_fx.remat.options_on_host import SegmentOnHost
from roundpipe_fx.schedules import ActionKind, StepCosts, Timing
from roundpipe_fx.schedules.offloads import offloads_at_distance
from roundpipe_fx.schedules.schedule import NUMBER

__all__ = ["segments_on_host"]

_BESIDE = 1
"""Number of actions beside which values are assumed to be copied."""


def segments_on_host(timing: Timing, costs: StepCosts, cuts: Sequence[StageCut]) -> list[SegmentOnHost]:
    """What there is to know of each segment.

    Args:
        timing: of the schedule, with nothing recomputed and nothing sent.
        costs: of its stage actions.
        cuts: the stages in the order in which they run; a segment's forward is in the first that has it, its backward
            in the last.
    """
    schedule = timing.schedule
    back = backward_stages(cuts)
    ahead = {segment: cut.index for cut in reversed(cuts) for segment in range(cut.first, cut.last + 1)}
    sizes = {cut.index: cut.last - cut.first + 1 for cut in cuts}
    last = max(back)
    copied = _copied(timing, costs, [ahead[last], back[last]])
    weights = _weights(timing, costs)

    @functools.cache
    def in_flight(forward: int, backward: int) -> int:
        devices = [d for d, order in enumerate(schedule.orders) if np.isin(order[:, 1], [forward, backward]).any()]
        return microbatches_in_flight(timing, [forward, backward], devices)

    return [
        SegmentOnHost(
            in_flight=in_flight(ahead[segment], back[segment]),
            may_leave=ahead[segment] in copied,
            passing=(1 + _BESIDE) * max(sizes[ahead[segment]], sizes[back[segment]]),
            copied=copied.get(ahead[segment], 0),
            forward=weights.get((True, ahead[segment]), 0),
            backward=weights.get((False, back[segment]), 0),
        )
        for segment in sorted(back)
    ]


def _copied(timing: Timing, costs: StepCosts, innermost: Sequence[int]) -> dict[int, int]:
    """For each stage from which values may leave, how many microbatches' are copied while the innermost stages run.

    Args:
        timing: of the schedule.
        costs: of its stage actions.
        innermost: stages that run the forward and the backward of the last segment.
    """
    orders = timing.schedule.orders
    may_leave, _ = offloads_at_distance(timing.schedule, costs, {}, _BESIDE)
    copied: dict[int, dict[tuple[int, int], set[int]]] = {}
    for own in may_leave:
        order = orders[own.device]
        beside = copied.setdefault(int(order[own.leaves - 1, 1]), {})
        for place in (*range(own.leaves, own.freed), *range(own.reloads, own.back)):
            if order[place, 1] in innermost:
                beside.setdefault((own.device, place), set()).add(own.microbatch)
    return {stage: max(map(len, beside.values()), default=0) for stage, beside in copied.items()}


def _weights(timing: Timing, costs: StepCosts) -> dict[tuple[bool, int], int]:
    """Bytes of weights and of their gradients, by whether a stage's forward runs or its backward, and by stage."""
    steps = list(timing.graph.steps)
    number = {(NUMBER[kind], stage): place for place, (kind, stage) in enumerate(steps)}
    orders = timing.schedule.orders
    codes = [np.array([number[kind, stage] for kind, stage, _ in order.tolist()], dtype=np.int64) for order in orders]
    found: dict[tuple[bool, int], int] = {}
    for order, windows in zip(orders, costs.windows(timing.schedule, codes, steps), strict=True):
        before = 0
        for window in windows:
            gradients = sum(window.gradients.values())
            size = window.resident + gradients + before
            before = gradients
            kinds = np.unique(order[window.places.start : window.places.stop, 0]).tolist()
            for key in {(kind == NUMBER[ActionKind.FORWARD], int(order[window.places.start, 1])) for kind in kinds}:
                found[key] = max(found.get(key, 0), size)
    return found
