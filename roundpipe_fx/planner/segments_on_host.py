"""Segments that may offload their saved values: the other bytes of their device, and the time for copies.

The other bytes (weights, gradients) follow from one simulation in which everything is saved and stays. They are the
bytes on the device while a stage runs, less those that the chain of segments counts for it. ::

    on the device while stage s runs     ████████████████████████     simulated
    counted by the chain                 ██████████████               saved × microbatches in flight + running
    resident besides                                   ██████████     the difference
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from roundpipe_fx.ir.segment import StageCut, backward_stages
from roundpipe_fx.planner.runs import count_in_flight
from roundpipe_fx.remat.chain import SegmentChain
from roundpipe_fx.remat.in_flight import SegmentRun
from roundpipe_fx.remat.options_on_host import SegmentOnHost
from roundpipe_fx.schedules import ActionKind, StepCosts, Timing
from roundpipe_fx.schedules.offloads import offloads_at_distance
from roundpipe_fx.schedules.timetable import NUMBER

_OVERLAPPED_ACTIONS = 1
"""Number of actions beside which values are assumed to be copied."""


def segments_on_host(
    timing: Timing, costs: StepCosts, cuts: Sequence[StageCut], chain: SegmentChain, runs: Sequence[SegmentRun]
) -> list[SegmentOnHost]:
    """Describe each segment.

    Args:
        timing: of the schedule, with nothing recomputed and nothing sent.
        costs: of its stage actions.
        cuts: the stages in the order in which they run; a segment's forward is in the first that has it, its backward
            in the last.
        chain: of one microbatch, whose first options save everything.
        runs: of segments whose saved values lie on the same devices.
    """
    schedule = timing.schedule
    back = backward_stages(cuts)
    ahead = {segment: cut.index for cut in reversed(cuts) for segment in range(cut.first, cut.last + 1)}
    sizes = {cut.index: cut.last - cut.first + 1 for cut in cuts}
    last = max(back)
    copied = _count_copied(timing, costs, [ahead[last], back[last]])
    held = _count_held(timing)

    @functools.cache
    def in_flight(forward: int, backward: int) -> int:
        devices = [d for d, order in enumerate(schedule.orders) if np.isin(order[:, 1], [forward, backward]).any()]
        return count_in_flight(timing, [forward, backward], devices)

    flights = [in_flight(ahead[segment], back[segment]) for segment in sorted(back)]
    counted: dict[tuple[bool, int], int] = {}
    for run in runs:
        # Bytes that the chain counts while a segment runs: saved values of the run's earlier segments for every
        # microbatch in flight, the segment's own for all but the running microbatch, and what running it takes.
        before = 0
        for segment in range(run.first, run.end):
            stage, option = chain.stages[segment], chain.stages[segment].options[0]
            saved = before + (flights[segment] - 1) * option.held
            before += flights[segment] * option.held
            for key, size in (
                ((True, ahead[segment]), saved + option.forward + stage.resident_forward),
                ((False, back[segment]), saved + option.backward + stage.resident),
            ):
                counted[key] = max(counted.get(key, 0), size)
    besides = {key: held.get(key, 0) - size for key, size in counted.items()}
    return [
        SegmentOnHost(
            in_flight=flights[segment],
            may_leave=ahead[segment] in copied,
            passing=(1 + _OVERLAPPED_ACTIONS) * max(sizes[ahead[segment]], sizes[back[segment]]),
            copied=copied.get(ahead[segment], 0),
            forward=besides[True, ahead[segment]],
            backward=besides[False, back[segment]],
        )
        for segment in sorted(back)
    ]


def _count_copied(timing: Timing, costs: StepCosts, innermost: Sequence[int]) -> dict[int, int]:
    """Count, for each stage that may offload, the microbatches whose values are copied while the innermost stages run.

    Args:
        innermost: stages that run the forward and the backward of the last segment.
    """
    orders = timing.schedule.orders
    may_leave, _ = offloads_at_distance(timing.schedule, costs, {}, _OVERLAPPED_ACTIONS)
    copied: dict[int, dict[tuple[int, int], set[int]]] = {}
    for offload in may_leave:
        # While the innermost stages run, most microbatches are in flight. Values that are being copied then are still,
        # or again, on the device.
        order = orders[offload.device]
        if order[offload.leaves - 1, 0] != NUMBER[ActionKind.FORWARD]:
            continue  # an offload after a backward is of gradients between slots, not of saved values
        in_flight = copied.setdefault(int(order[offload.leaves - 1, 1]), {})
        for position in (*range(offload.leaves, offload.freed), *range(offload.reloads, offload.back)):
            if order[position, 1] in innermost:
                in_flight.setdefault((offload.device, position), set()).add(offload.microbatch)
    return {stage: max(map(len, in_flight.values()), default=0) for stage, in_flight in copied.items()}


def _count_held(timing: Timing) -> dict[tuple[bool, int], int]:
    """Most bytes on a device while a stage runs, by (is its forward, stage)."""
    most: dict[tuple[bool, int], int] = {}
    for order, sizes in zip(timing.schedule.orders, timing.action_bytes, strict=True):
        for (kind, stage, _), size in zip(order.tolist(), sizes.tolist(), strict=True):
            key = kind == NUMBER[ActionKind.FORWARD], stage
            most[key] = max(most.get(key, 0), size)
    return most
