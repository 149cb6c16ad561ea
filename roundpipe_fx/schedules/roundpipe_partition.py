"""Which layers go into which slot of RoundPipe's dispatch.

If the backward of a layer with its recomputation takes three times as long as its forward, a backward slot holds a
third of the layers of a forward slot. The end of the model, whose head may be as heavy as several layers, runs its
backward right after its forward, in one fused slot.

Every number of forward slots and of backward slots is considered, with every end of the model that may be fused; slots
of one kind are balanced exactly. A slot must be a small part of the model. The partitions with the best estimates, from
their total work and their longest slot, are simulated, and the one with the shortest step is chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from roundpipe_fx.schedules.partition import even_runs
from roundpipe_fx.schedules.round_robin import dispatch

_DISPATCHED, _DISPATCHED_ACTIONS = 400, 400_000
"""This many partitions are simulated, and further ones until they have so many actions: where one slot is longer than
all others, the estimates of most are equal."""
FUSED = 12
"""At most this many segments are fused."""
_SLOTS_A_DEVICE = 5
"""At most this many slots per device."""


@dataclass(frozen=True)
class RoundPipePartition:
    """A division of the segments into slots.

    Attributes:
        forward: (first, last) segment of each forward slot.
        fused: (first, last) segment of the slot that runs forward and backward.
        backward: (first, last) segment of each backward slot, in the order in which they run: last segments first.
    """

    forward: tuple[tuple[int, int], ...]
    fused: tuple[int, int]
    backward: tuple[tuple[int, int], ...]

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.forward) + 1 + len(self.backward)


def balance_roundpipe_stages(
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    recompute: bool,
    devices: int,
    microbatches: int,
) -> RoundPipePartition:
    """The partition with the shortest simulated step among those with the best estimates.

    Args:
        forward_seconds: of each segment, for one microbatch.
        backward_seconds: modelled seconds of each item's backward, without recomputation.
        recompute: whether backward slots run the forward again.
    """
    forward, backward = list(forward_seconds), list(backward_seconds)
    # A backward slot recomputes its segments; the fused one does not.
    recomputing = [b + (f if recompute else 0.0) for f, b in zip(forward, backward, strict=True)]
    hopeful = sorted(
        (
            _estimate(slot_seconds(tried, forward, backward, recomputing), devices, microbatches),
            tried.slots,
            index,
            tried,
        )
        for index, tried in enumerate(_divisions(forward, recomputing, devices))
        if is_spread(tried, slot_seconds(tried, forward, backward, recomputing), devices)
    )
    # Estimates leave out that workers wait, so the most promising partitions are dispatched for real.
    best = min(
        (dispatch(devices, slot_seconds(tried, forward, backward, recomputing), microbatches).makespan, position)
        for position, tried in enumerate(_keep_promising([tried for *_, tried in hopeful], microbatches))
    )
    return hopeful[best[1]][-1]


def _keep_promising(hopeful: Sequence[RoundPipePartition], microbatches: int) -> Iterator[RoundPipePartition]:
    actions = 0
    # Enough partitions, and enough actions: partitions of few slots are cheap to simulate, so more of them are.
    for count, tried in enumerate(hopeful):
        actions += tried.slots * microbatches
        if count >= _DISPATCHED and actions > _DISPATCHED_ACTIONS:
            return
        yield tried


def slot_seconds(
    tried: RoundPipePartition, forward: Sequence[float], backward: Sequence[float], recomputing: Sequence[float]
) -> list[float]:
    """Seconds of each slot, for one microbatch.

    Args:
        forward: seconds of each segment's forward.
        backward: seconds of its backward.
        recomputing: seconds of its backward with its recomputation.
    """
    first, last = tried.fused
    return [
        *(sum(forward[a : b + 1]) for a, b in tried.forward),
        sum(forward[first : last + 1]) + sum(backward[first : last + 1]),
        *(sum(recomputing[a : b + 1]) for a, b in tried.backward),
    ]


def is_spread(tried: RoundPipePartition, slots: list[float], devices: int) -> bool:
    """Test for a division without a slot that is most of the model.

    There is at least one slot per device, and the fused one is no longer than the others.

    Otherwise a single device would get what no device has memory for, since the fused slot recomputes nothing.
    """
    # A single fused segment cannot be divided further: only the number of slots counts.
    if tried.fused[0] == tried.fused[1]:
        return tried.slots >= min(devices, 1 + 2 * tried.fused[0])
    fused = len(tried.forward)
    others = slots[:fused] + slots[fused + 1 :]
    return tried.slots >= devices and slots[fused] <= max(others, default=0.0)


def _divisions(forward: list[float], recomputing: list[float], devices: int) -> Iterator[RoundPipePartition]:
    count = len(forward)
    most = _SLOTS_A_DEVICE * devices
    divide = make_divider(forward, recomputing)
    # The fused slot ends with the last segment and begins at one of the last few.
    for first in range(count - 1, max(-1, count - 1 - FUSED), -1):
        # Everything is fused: one slot, without a forward or a backward of its own.
        if not first:
            yield RoundPipePartition((), (0, count - 1), ())
        for ahead_slots in range(1, min(first, most) + 1):
            for back_slots in range(1, min(first, most - ahead_slots) + 1):
                yield divide(first, ahead_slots, back_slots)


def make_divider(
    forward_seconds: Sequence[float], backward_seconds: Sequence[float]
) -> Callable[[int, int, int], RoundPipePartition]:
    """Partitions whose slots of one kind are balanced exactly.

    Args:
        forward_seconds: of each segment in a forward slot.
        backward_seconds: of each segment in a backward slot.

    Returns:
        a function of the first segment that is fused, and of the numbers of forward and of backward slots before it.
    """

    @functools.cache
    def ahead(first: int, slots: int) -> tuple[tuple[int, int], ...]:
        return tuple(even_runs(forward_seconds[:first], slots))

    @functools.cache
    def back(first: int, slots: int) -> tuple[tuple[int, int], ...]:
        # The backward runs from the last segment: divided in reverse, then mirrored.
        return tuple((first - 1 - b, first - 1 - a) for a, b in even_runs(backward_seconds[:first][::-1], slots))

    def divide(first: int, ahead_slots: int, back_slots: int) -> RoundPipePartition:
        fused = (first, len(forward_seconds) - 1)
        return RoundPipePartition(ahead(first, ahead_slots), fused, back(first, back_slots))

    return divide


def _estimate(slots: list[float], devices: int, microbatches: int) -> float:
    """Estimated seconds of a step in which all workers are busy except at its start and end."""
    # Work shared by all devices, plus the pipeline's ramp of (p - 1) times the longest slot.
    return microbatches * sum(slots) / devices + (devices - 1) * max(slots)
