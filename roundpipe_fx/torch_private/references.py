"""References to a tensor and its memory, as Python and PyTorch count them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["is_sole_reference"]


def _counts(values: Sequence[Any], place: int) -> tuple[int, int, int]:
    value = values[place]
    storage = value.untyped_storage()
    return sys.getrefcount(value), value._use_count(), torch._C._storage_Use_Count(storage._cdata)


_ALONE = _counts([torch.empty(0)], 0)
"""Counted in the same way, for a tensor that nothing but its list refers to."""


def is_sole_reference(values: list[Any], place: int) -> bool:
    """Test for a tensor in a list that nothing else refers to, nor to its memory.

    Args:
        values: the list; no name may refer to the tensor. Views, and tensors that autograd has saved, count.
        place: position of the tensor.
    """
    return _counts(values, place) == _ALONE
