"""Copies on another device that keep the strides of the original.

``Tensor.to`` makes the elements of a slice, or of an expanded tensor, contiguous. Reductions accumulate in memory
order, so gradients would not be bitwise equal::

    original                                   Tensor.to         here
    (4, 8) sliced to (4, 4), strides (8, 1)    strides (4, 1)    strides (8, 1)
    (4, 1) expanded to (4, 8), strides (1, 0)  strides (8, 1)    strides (1, 0)
    two views of one storage                   two storages      two views of one storage
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def copy_to_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on another device, with the strides of the original.

    Args:
        value: a tensor. If its elements overlap in memory (as in ``unfold``), the copy is contiguous.
    """
    if any(step == 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True)):
        shape = [1 if step == 0 else size for size, step in zip(value.shape, value.stride(), strict=True)]
        return copy_to_device(value.as_strided(shape, value.stride()), device).expand(value.shape)
    if _is_dense_or_overlaps(value):
        return value.to(device, non_blocking=True)
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return copy.copy_(value, non_blocking=True)


def copy_values_to_device(values: Sequence[Any], device: torch.device) -> tuple[Any, ...]:
    """Copies of several values on another device; tensors that share a storage share one again.

    Args:
        values: tensors and other values. Tensors on the CPU, and values that are not tensors, are returned as they are.
    """
    sent = list(values)
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            groups.setdefault((value.untyped_storage()._cdata, value.dtype), []).append(position)
    for positions in groups.values():
        if len(positions) == 1:
            sent[positions[0]] = copy_to_device(values[positions[0]], device)
            continue
        views = [values[position] for position in positions]
        start = min(view.storage_offset() for view in views)
        end = max(view.storage_offset() + _extent(view) for view in views)
        memory = views[0].as_strided((end - start,), (1,), start).to(device, non_blocking=True)
        for position, view in zip(positions, views, strict=True):
            sent[position] = memory.as_strided(view.shape, view.stride(), view.storage_offset() - start)
    return tuple(sent)


def _extent(value: torch.Tensor) -> int:
    """Number of elements from a tensor's first element in memory up to and including its last one."""
    if value.numel() == 0:
        return 0
    return 1 + sum(step * (size - 1) for step, size in zip(value.stride(), value.shape, strict=True))


def _is_dense_or_overlaps(value: torch.Tensor) -> bool:
    """Return whether the elements are dense in memory, or overlap, as in ``unfold``."""
    extent = 1
    for step, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if step < extent:
                return True
            extent += step * (size - 1)
    return extent == value.numel() or value.numel() == 0
