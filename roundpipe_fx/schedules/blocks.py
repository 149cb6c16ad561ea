"""Sequences of actions as arrays, from which schedules are assembled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roundpipe_fx.schedules.action import ActionKind
from roundpipe_fx.schedules.schedule import NUMBER

__all__ = ["block_of", "pairs", "run_of"]


def run_of(device: int, devices: int, stages: int) -> list[int]:
    """Indices of a device's consecutive stages, with the stages divided among devices as evenly as possible."""
    return list(range(device * stages // devices, (device + 1) * stages // devices))


def block_of(kind: ActionKind, stages: Sequence[int], microbatches: int, start: int = 0) -> np.ndarray:
    """Actions that run each microbatch from ``start`` on through all ``stages`` in turn; shape (actions, 3)."""
    count = max(0, microbatches - start)
    made = np.empty((count * len(stages), 3), dtype=np.int32)
    made[:, 0] = NUMBER[kind]
    made[:, 1] = np.tile(np.asarray(stages, dtype=np.int32), count)
    made[:, 2] = np.repeat(np.arange(start, start + count, dtype=np.int32), len(stages))
    return made


def pairs(first: np.ndarray, second: np.ndarray, width: int) -> np.ndarray:
    """``width`` actions of ``first`` and ``width`` actions of ``second`` in alternation; both have the same length."""
    both = np.stack([first.reshape(-1, width, 3), second.reshape(-1, width, 3)], axis=1)
    return both.reshape(-1, 3)
