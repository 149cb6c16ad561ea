"""Which layers go into which slot of RoundPipe's dispatch.

Where a layer's backward, with its recomputation, takes three times its forward, a backward slot holds a third of the
layers of a forward slot; and the model's end, whose head may be as heavy as several layers, runs its backward right
after its forward, in one fused slot.

For each longest time that a slot may take, slots are packed as full as they go and then, for their number, balanced
exactly; the division is chosen whose step, as the caller simulates it, is shortest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roundpipe_fx.balance import even_runs

__all__ = ["Rounds", "fit_rounds"]

_CANDIDATES = 48


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
    makespan: Callable[[Rounds, Sequence[float], Sequence[float]], float],
) -> Rounds:
    """The division whose step is shortest.

    Args:
        forward_seconds: of each segment.
        backward_seconds: of each segment, without recomputation.
        recompute: whether backward slots run the forward again.
        makespan: seconds of a step, given a division and each segment's seconds of forward and of backward.
    """
    forward = list(forward_seconds)
    again = [b + (f if recompute else 0.0) for f, b in zip(forward, backward_seconds, strict=True)]
    fused = [f + b for f, b in zip(forward, backward_seconds, strict=True)]
    best: tuple[float, Rounds] | None = None
    for limit in _limits(forward, again, fused):
        tried = _pack(forward, again, fused, limit)
        tried = _balanced(tried, forward, again)
        seconds = makespan(tried, forward, again)
        if best is None or seconds < best[0] * (1 - 1e-9):
            best = (seconds, tried)
    assert best is not None
    return best[1]


def _limits(forward: list[float], again: list[float], fused: list[float]) -> list[float]:
    """Longest times of a slot that are worth trying, from the heaviest single segment up to everything in one."""
    least = max([fused[-1], *forward[:-1], *again[:-1]])
    most = max(sum(fused), sum(forward), sum(again))
    ratio = max(most / least, 1.0) if least else 1.0
    return [least * ratio ** (index / (_CANDIDATES - 1)) for index in range(_CANDIDATES)]


def _pack(forward: list[float], again: list[float], fused: list[float], limit: float) -> Rounds:
    limit *= 1 + 1e-9
    first = len(fused) - 1
    while first > 0 and sum(fused[first - 1 :]) <= limit:
        first -= 1
    return Rounds(
        tuple(_greedy(forward[:first], limit)),
        (first, len(fused) - 1),
        tuple((first - 1 - b, first - 1 - a) for a, b in _greedy(again[:first][::-1], limit)),
    )


def _greedy(seconds: list[float], limit: float) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    start, total = 0, 0.0
    for index, own in enumerate(seconds):
        if index > start and total + own > limit:
            ranges.append((start, index - 1))
            start, total = index, 0.0
        total += own
    return [*ranges, (start, len(seconds) - 1)] if seconds else []


def _balanced(rounds: Rounds, forward: list[float], again: list[float]) -> Rounds:
    """The same counts of slots, the slowest of each kind as fast as can be."""
    first = rounds.fused[0]
    ahead = even_runs(forward[:first], len(rounds.forward))
    back = [(first - 1 - b, first - 1 - a) for a, b in even_runs(again[:first][::-1], len(rounds.backward))]
    return Rounds(tuple(ahead), rounds.fused, tuple(back))
