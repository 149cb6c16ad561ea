"""Sums of gradients: a microbatch's gradient is added to those of earlier ones as soon as it is made.

A stage module that hands out its gradients together holds all of them beside their sums. One that is given the sums
holds one gradient at a time.
"""

from __future__ import annotations

import torch

__all__ = ["add_to"]


def add_to(total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """Add a gradient to those of earlier microbatches, in place.

    Args:
        total: what earlier ones add up to; ``None``: this is the first, and nobody else holds its memory.
        gradient: of the same shape, strides and dtype.

    Returns:
        the sum.
    """
    return gradient if total is None else total.add_(gradient)
