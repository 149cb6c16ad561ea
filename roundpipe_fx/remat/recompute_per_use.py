"""Recompute per use: a segment's backward in which as little as possible is kept from one reader to the next.

Dropping storages that are idle at the peak, one at a time, stops where two have to be dropped together. This module
starts from the other end: every storage is recomputed for each of its readers, and no sequence of these steps has a
lower peak. Then storages that are recomputed more than once are recomputed less often, the costliest first, as long as
the peak does not rise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from roundpipe_fx.analysis.operations import PlannedOp

_LONGEST = 400
"""Blocks whose full expansion exceeds this many steps are skipped."""


def recompute_per_use(
    steps: Sequence[PlannedOp], orders: Sequence[Sequence[int]], peak: Callable[[Sequence[int]], int], below: int
) -> list[int] | None:
    """A sequence of steps with a low peak, listed by position; a step that runs twice is listed twice.

    Args:
        steps: of a segment's backward, each once.
        orders: of those that are not recomputed, by position; the one with the lower peak is taken.
        peak: the most bytes alive in a sequence.
        below: bytes: a peak that is known.

    Returns:
        the sequence; ``None`` if its peak would not be lower than the one that is known.
    """
    maker = {storage: position for position, step in enumerate(steps) if step.recipe for storage in step.makes}
    expanded = [expansion for order in orders if (expansion := _expand(steps, maker, order)) is not None]
    lowest, sequence = min(((peak(sequence), sequence) for sequence in expanded), default=(below, []))
    if lowest >= below:
        return None
    often = {index for index in sequence if sequence.count(index) > 1}
    # Costliest first, and for each the smallest number of runs that keeps the peak.
    for index in sorted(often, key=lambda index: -steps[index].seconds):
        for keep in range(1, sequence.count(index)):
            tried = _drop_unread(steps, maker, _limit_repeats(sequence, index, keep))
            if peak(tried) <= lowest:
                sequence = tried
                break
    return sequence


def _expand(steps: Sequence[PlannedOp], maker: dict[int, int], readers: Sequence[int]) -> list[int] | None:
    """Every storage recomputed for each of its readers; ``None``: that takes too many steps."""
    sequence: list[int] = []
    for reader in readers:
        sequence += (*_recomputed_for(steps, maker, reader), reader)
        if len(sequence) > _LONGEST:
            return None
    return sequence


def _recomputed_for(steps: Sequence[PlannedOp], maker: dict[int, int], reader: int) -> list[int]:
    """Positions of the recomputations for one reader, in order."""
    sequence: list[int] = []
    # Depth first with a stack. A position is pushed twice: (position, True) runs when its sources have been listed.
    pending = [(reader, False)]
    while pending:
        index, ready = pending.pop()
        if index in sequence:
            continue
        if ready:
            sequence.append(index)
            continue
        if index != reader:
            pending.append((index, True))
        pending += [(maker[storage], False) for storage in reversed(steps[index].reads) if storage in maker]
    return sequence


def _limit_repeats(sequence: Sequence[int], index: int, times: int) -> list[int]:
    """The sequence in which a step runs only the first few times."""
    kept_positions: list[int] = []
    for other in sequence:
        if other != index or times > 0:
            kept_positions.append(other)
        times -= other == index
    return kept_positions


def _drop_unread(steps: Sequence[PlannedOp], maker: dict[int, int], sequence: Sequence[int]) -> list[int]:
    """The sequence without results that are not read before they are recomputed."""
    wanted: set[int] = set()
    read = []
    # From the end: a recomputation stays if its result is read before the next recomputation of the same storage.
    for index in reversed(sequence):
        step = steps[index]
        if step.recipe is not None:
            if wanted.isdisjoint(step.makes):
                continue
            wanted.difference_update(step.makes)
        wanted.update(storage for storage in step.reads if storage in maker)
        read.append(index)
    return read[::-1]
