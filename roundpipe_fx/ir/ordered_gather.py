"""Ordered gather: recomputes the values of a selection, in the memory order that the selection's own kernel gives them.

``sort`` returns values with the strides of its operand; the result of ``gather`` is always contiguous. The strides of
an operand determine the order in which the next kernel traverses it, and thereby how a sum is rounded. Emitted programs
call this.
"""

from __future__ import annotations

import torch

from roundpipe_fx.torch_private import size_hint


def gather_in_order(source: torch.Tensor, dim: int, indices: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """``gather`` with a result that is dense in memory in an order of its dimensions.

    Args:
        source: the tensor to gather from.
        dim: the dimension along which.
        indices: of the result's shape.
        order: the result's dimensions from the outermost in memory to the innermost.
    """
    inverse = [order.index(position) for position in range(len(order))]
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
