"""Ordered gather: values of a selection again, lying in memory as the selection's own kernel lets them lie.

``sort`` returns values that lie in memory like its operand; the result of ``gather`` is always contiguous. How an
operand lies decides how the next kernel goes through it, and so how a sum is rounded. Emitted programs call this.
"""

from __future__ import annotations

import torch

from roundpipe_fx.torch_private import size_hint

__all__ = ["gather_in_order", "memory_order"]


def gather_in_order(source: torch.Tensor, dim: int, indices: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """``gather`` with a result that is dense in memory in an order of its dimensions.

    Args:
        source: what is gathered from.
        dim: the dimension along which.
        indices: of the result's shape.
        order: the result's dimensions from the outermost in memory to the innermost.
    """
    inverse = [order.index(own) for own in range(len(order))]
    along = order.index(dim % len(order))
    return torch.gather(source.permute(order), along, indices.permute(order)).permute(inverse)


def memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """A tensor's dimensions from the outermost in memory to the innermost; ``None``: it is not dense."""
    sizes, strides = [*map(size_hint, value.shape)], [*map(size_hint, value.stride())]
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    following = 1
    for dim in reversed(order):
        if strides[dim] != following:
            return None
        following *= max(sizes[dim], 1)
    return tuple(order)
