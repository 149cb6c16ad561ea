"""Partial writes: a part of a value is written over in place, where nothing else needs what it was.

The functional operators that do the same (``slice_scatter`` and its like) return a copy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

aten = torch.ops.aten


def copy_alike(value: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, and without what lies around a value in its storage."""
    alike = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return alike.copy_(value)


def write_slice(
    value: torch.Tensor,
    part: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> torch.Tensor:
    """``slice_scatter`` in place; returns the value."""
    aten.slice.Tensor(value, dim, start, end, step).copy_(part)
    return value


def write_select(value: torch.Tensor, part: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """``select_scatter`` in place; returns the value."""
    aten.select.int(value, dim, index).copy_(part)
    return value


def write_diagonal(
    value: torch.Tensor, part: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """``diagonal_scatter`` in place; returns the value."""
    aten.diagonal.default(value, offset, dim1, dim2).copy_(part)
    return value


def write_strided(
    value: torch.Tensor,
    part: torch.Tensor,
    size: list[int],
    stride: list[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    """``as_strided_scatter`` in place; returns the value."""
    aten.as_strided.default(value, size, stride, storage_offset).copy_(part)
    return value


PARTIAL_WRITES: dict[torch._ops.OpOverload, Callable[..., torch.Tensor]] = {
    aten.slice_scatter.default: write_slice,
    aten.select_scatter.default: write_select,
    aten.diagonal_scatter.default: write_diagonal,
    aten.as_strided_scatter.default: write_strided,
}
"""What writes in place, by the functional operator."""
