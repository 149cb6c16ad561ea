"""Which layers go into which slot of RoundPipe's dispatch.

Where a layer's backward, with its recomputation, takes three times its forward, a backward slot holds a third of the
layers of a forward slot; and the model's end, whose head may be as heavy as several layers, runs its backward right
after its forward, in one fused slot.

Every number of forward slots and of backward slots is looked at, with every end of the model that may be fused; slots
of one kind are balanced exactly. A bound tells which of these divisions may be good: a device cannot be done before
the slots that come before its first, all its own for all microbatches, and the slots after its last. Those with the
lowest bounds are simulated, and the one whose step is shortest is chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from roundpipe_fx.balance import even_runs
from roundpipe_fx.schedules.action import Kind, Step
from roundpipe_fx.schedules.round_robin import round_robin
from roundpipe_fx.schedules.stage_graph import rounds
from roundpipe_fx.schedules.timing import StepCosts, simulate_time

__all__ = ["Rounds", "fit_rounds", "round_seconds"]

_SIMULATED = 24
_FUSED = 12
_SLOTS_A_DEVICE = 5


@dataclass(frozen=True)
class Rounds:
    """How the segments are divided.

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
        """How many slots there are."""
        return len(self.forward) + 1 + len(self.backward)


def fit_rounds(
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    recompute: bool,
    devices: int,
    microbatches: int,
) -> Rounds:
    """A division whose step is short.

    Args:
        forward_seconds: of each segment, for one microbatch.
        backward_seconds: likewise, without recomputation.
        recompute: whether backward slots run the forward again.
        devices: how many.
        microbatches: how many.
    """
    forward, backward = list(forward_seconds), list(backward_seconds)
    again = [b + (f if recompute else 0.0) for f, b in zip(forward, backward, strict=True)]
    bounds = sorted(
        (
            (_bound(_slot_seconds(tried, forward, backward, again), devices, microbatches), tried.slots, tried)
            for tried in _divisions(forward, again, devices)
        ),
        key=lambda item: item[:2],
    )

    def makespan(tried: Rounds) -> float:
        fused = len(tried.forward)
        costs = StepCosts(round_seconds(tried, forward, backward, again))
        schedule = round_robin(devices, fused, tried.slots, microbatches)
        return simulate_time(schedule, rounds(fused, tried.slots), costs).makespan

    best: tuple[float, Rounds] | None = None
    for bound, _, tried in bounds[:_SIMULATED]:
        if best is not None and bound >= best[0]:
            break
        seconds = makespan(tried)
        if best is None or seconds < best[0]:
            best = (seconds, tried)
    assert best is not None
    return best[1]


def round_seconds(
    tried: Rounds, forward: Sequence[float], backward: Sequence[float], again: Sequence[float]
) -> dict[Step, float]:
    """Seconds of each slot's steps, for one microbatch.

    Args:
        tried: a division.
        forward: seconds of each segment's forward.
        backward: of its backward.
        again: of its backward with what is recomputed for it.
    """
    fused = len(tried.forward)
    seconds: dict[Step, float] = {(Kind.FORWARD, i): sum(forward[a : b + 1]) for i, (a, b) in enumerate(tried.forward)}
    first, last = tried.fused
    seconds[Kind.FORWARD, fused] = sum(forward[first : last + 1])
    seconds[Kind.BACKWARD, fused] = sum(backward[first : last + 1])
    for index, (a, b) in enumerate(tried.backward):
        seconds[Kind.BACKWARD, fused + 1 + index] = sum(again[a : b + 1])
    return seconds


def _slot_seconds(
    tried: Rounds, forward: Sequence[float], backward: Sequence[float], again: Sequence[float]
) -> list[float]:
    slots = [0.0] * tried.slots
    for (_, slot), seconds in round_seconds(tried, forward, backward, again).items():
        slots[slot] += seconds
    return slots


def _divisions(forward: list[float], again: list[float], devices: int) -> Iterator[Rounds]:
    count = len(forward)
    most = _SLOTS_A_DEVICE * devices

    @functools.cache
    def ahead(first: int, slots: int) -> tuple[tuple[int, int], ...]:
        return tuple(even_runs(forward[:first], slots))

    @functools.cache
    def back(first: int, slots: int) -> tuple[tuple[int, int], ...]:
        return tuple((first - 1 - b, first - 1 - a) for a, b in even_runs(again[:first][::-1], slots))

    for first in range(count - 1, max(-1, count - 1 - _FUSED), -1):
        if not first:
            yield Rounds((), (0, count - 1), ())
        for ahead_slots in range(1, min(first, most) + 1):
            for back_slots in range(1, min(first, most - ahead_slots) + 1):
                yield Rounds(ahead(first, ahead_slots), (first, count - 1), back(first, back_slots))


def _bound(slots: list[float], devices: int, microbatches: int) -> float:
    before = [0.0, *accumulate(slots)]
    total = before[-1]
    found = 0.0
    for device in range(min(devices, len(slots))):
        own = range(device, len(slots), devices)
        work = microbatches * sum(slots[slot] for slot in own)
        found = max(found, before[device] + work + total - before[own[-1] + 1])
    return found
