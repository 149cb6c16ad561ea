"""Visits: which tensors of an offloaded model a device has, and when.

A visit is a run of a device's actions that are of one stage. A device has what the visit at hand reads and what the
next one reads, which is brought while it works; at the end of a visit it lets go what neither of the following two
reads. Gradients are added up during a visit and leave at its end, while the next one works; then they are gone. This is
how RoundPipe (thustorage/RoundPipe) streams weights, and FSDP (Zhao et al., 2023) prefetches them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np

__all__ = ["ResidencyWindow", "residency_windows", "resident", "window_ranges"]


def window_ranges(stages: Sequence[int] | np.ndarray) -> list[range]:
    """The visits of a device: places of their actions.

    Args:
        stages: the stage of each of its actions.
    """
    stages = np.asarray(stages)
    if not len(stages):
        return []
    bounds = [0, *(np.flatnonzero(stages[1:] != stages[:-1]) + 1).tolist(), len(stages)]
    return [range(start, end) for start, end in pairwise(bounds)]


def resident(reads: Sequence[AbstractSet[int]]) -> list[set[int]]:
    """What a device has during each visit.

    Args:
        reads: what each visit reads.
    """
    nothing: AbstractSet[int] = frozenset()
    return [set(own) | following for own, following in zip_longest(reads, reads[1:], fillvalue=nothing)]


@dataclass(frozen=True)
class ResidencyWindow:
    """A visit in bytes.

    Attributes:
        places: of its actions.
        resident: of tensors that are there during it.
        first: of those, what nothing before it has brought: what the first visit reads.
        brought: what is brought during it.
        gradients: what it leaves, by number of the parameter.
    """

    places: range
    resident: int
    first: int
    brought: int
    gradients: Mapping[int, int]


def residency_windows(
    stages: np.ndarray,
    codes: np.ndarray,
    reads: Sequence[Mapping[int, int]],
    gradients: Sequence[Mapping[int, int]],
    turn: int = 0,
) -> list[ResidencyWindow]:
    """The visits of a device.

    Args:
        stages: of each of its actions.
        codes: number of the step of each of its actions.
        reads: by number of a step, bytes of the tensors that it reads, by their numbers.
        gradients: likewise of the gradients that it adds to.
        turn: the action before which everything is let go: that with which the backward half of a step begins.
    """
    found: list[ResidencyWindow] = []
    for start, end in ((0, turn), (turn, len(stages))):
        places = [range(own.start + start, own.stop + start) for own in window_ranges(stages[start:end])]
        steps = [np.unique(codes[own.start : own.stop]).tolist() for own in places]
        sizes = {number: size for own in steps for code in own for number, size in reads[code].items()}
        needed = [{number for code in own for number in reads[code]} for own in steps]
        before: set[int] = set()
        for own, codes_of, there in zip(places, steps, resident(needed), strict=True):
            first = needed[0] if own is places[0] else set()
            left = {owner: size for code in codes_of for owner, size in gradients[code].items()}
            size = [sum(sizes[number] for number in part) for part in (there, first, there - before - first)]
            found.append(ResidencyWindow(own, size[0], size[1], size[2], left))
            before = there
    return found
