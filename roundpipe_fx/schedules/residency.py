"""Residency windows: which tensors of an offloaded model are on a device, and when.

A window is a run of consecutive actions of a device that belong to one stage. The device has the tensors that the
current window reads, and those of the next one, which are copied meanwhile; at the end of a window it frees the tensors
that neither of the following two windows reads. Gradients are accumulated during a window, copied to the host during
the next one, and then freed. This is how RoundPipe (thustorage/RoundPipe) streams weights, and how FSDP (Zhao et al.,
2023) prefetches them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np


def window_ranges(stages: Sequence[int] | np.ndarray) -> list[range]:
    """Positions of the actions of each residency window of a device.

    Args:
        stages: the stage of each of its actions.
    """
    stages = np.asarray(stages)
    if not len(stages):
        return []
    bounds = [0, *(np.flatnonzero(stages[1:] != stages[:-1]) + 1).tolist(), len(stages)]
    return [range(start, end) for start, end in pairwise(bounds)]


def resident(reads: Sequence[AbstractSet[int]]) -> list[set[int]]:
    """Tensors that are on a device during each window: those that it reads and those of the next one.

    Args:
        reads: numbers of the tensors that each window reads.
    """
    nothing: AbstractSet[int] = frozenset()
    return [set(numbers) | following for numbers, following in zip_longest(reads, reads[1:], fillvalue=nothing)]


@dataclass(frozen=True)
class ResidencyWindow:
    """A residency window, in bytes.

    Attributes:
        positions: positions of its actions.
        resident: bytes of the tensors on the device during it.
        first: bytes that are copied before it begins: what the first window reads.
        prefetched: bytes that are copied to the device during it, for the next window.
        gradients: bytes of the gradients that it accumulates, by number of the parameter.
    """

    positions: range
    resident: int
    first: int
    prefetched: int
    gradients: Mapping[int, int]


def residency_windows(
    stages: np.ndarray,
    codes: np.ndarray,
    reads: Sequence[Mapping[int, int]],
    gradients: Sequence[Mapping[int, int]],
    turn: int = 0,
) -> list[ResidencyWindow]:
    """The residency windows of a device.

    Args:
        stages: stage of each of its actions.
        codes: number of the stage action of each of its actions.
        reads: for each stage action, bytes of the tensors that it reads, by number of the tensor.
        gradients: for each stage action, bytes of the gradients that it adds to, by number of the parameter.
        turn: position of the first action of the backward half of a step, before which everything is freed.
    """
    windows: list[ResidencyWindow] = []
    for start, end in ((0, turn), (turn, len(stages))):
        positions = [range(ahead.start + start, ahead.stop + start) for ahead in window_ranges(stages[start:end])]
        steps = [np.unique(codes[window.start : window.stop]).tolist() for window in positions]
        sizes = {number: size for of_window in steps for code in of_window for number, size in reads[code].items()}
        needed = [{number for code in of_window for number in reads[code]} for of_window in steps]
        before: set[int] = set()
        for window, codes_of, there in zip(positions, steps, resident(needed), strict=True):
            first = needed[0] if window is positions[0] else set()
            left = {owner: size for code in codes_of for owner, size in gradients[code].items()}
            size = [sum(sizes[number] for number in part) for part in (there, first, there - before - first)]
            windows.append(ResidencyWindow(window, size[0], size[1], size[2], left))
            before = there
    return windows
