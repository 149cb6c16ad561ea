"""Runs of segments whose saved values are on the same devices, and the number of microbatches in flight there."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np

from roundpipe_fx.ir.segment import StageCut
from roundpipe_fx.remat.in_flight import SegmentRun
from roundpipe_fx.schedules import ActionKind, Timing
from roundpipe_fx.schedules.timetable import NUMBER


def find_runs(timing: Timing, cuts: Sequence[StageCut]) -> list[SegmentRun]:
    """Runs of stages that are bound to the same devices.

    Args:
        cuts: the stages of the schedule; if backwards have others than forwards (RoundPipe's dispatch), every device
            runs them all.
    """
    orders = timing.schedule.orders
    forward = {stage for order in orders for stage in order[order[:, 0] == NUMBER[ActionKind.FORWARD], 1].tolist()}
    devices = {cut.index: frozenset(d for d, order in enumerate(orders) if cut.index in order[:, 1]) for cut in cuts}
    if any(cut.index not in forward for cut in cuts):
        everywhere = frozenset(range(len(orders)))
        first, last = min(cut.first for cut in cuts), max(cut.last for cut in cuts)  # backward slots: last ones first
        return [SegmentRun(first, last + 1, everywhere, count_in_flight(timing, None, everywhere))]
    runs = []
    for where, group in itertools.groupby(cuts, lambda cut: devices[cut.index]):
        members = list(group)
        stages = [cut.index for cut in members]
        runs.append(SegmentRun(members[0].first, members[-1].last + 1, where, count_in_flight(timing, stages, where)))
    return runs


def count_in_flight(timing: Timing, stages: Collection[int] | None, devices: Collection[int]) -> int:
    """The most microbatches that have begun some stages and not yet run their backward, per device.

    Args:
        stages: which stages; ``None``: all.
    """
    begun = np.full(max(timing.schedule.microbatches, 1), np.inf)
    over = np.full(len(begun), -np.inf)
    for order, starts, ends in zip(timing.schedule.orders, timing.starts, timing.ends, strict=True):
        inside = np.ones(len(order), bool) if stages is None else np.isin(order[:, 1], list(stages))
        forward = inside & (order[:, 0] == NUMBER[ActionKind.FORWARD])
        np.minimum.at(begun, order[forward, 2], starts[forward])
        np.maximum.at(over, order[inside, 2], ends[inside])
    most = max(int(((begun <= moment) & (over > moment)).sum()) for moment in begun.tolist())
    return max(1, -(-most // len(devices)))
