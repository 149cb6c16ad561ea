"""Sums: a microbatch's gradient is added to those of earlier ones as soon as it is made, and what tiles add up to.

A stage module that returns its gradients together holds all of them beside their sums. One that is given the sums holds
one gradient at a time, and none where a matrix product writes over the sum at once (Megatron-LM's "gradient
accumulation fusion").
"""

from __future__ import annotations

import torch


def add_to(total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """Add a gradient to those of earlier microbatches, in place.

    Args:
        total: what earlier ones add up to; ``None``: this is the first, and nothing else refers to its memory.
        gradient: of the same shape, strides and dtype.

    Returns:
        the sum.
    """
    return gradient if total is None else total.add_(gradient)


def add_copy_to(total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """The same for a gradient whose memory is referred to elsewhere, or that is a part of another tensor."""
    return gradient.clone() if total is None else total.add_(gradient)


def add_product_to(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The same for a gradient that is a matrix product, which is not computed on its own.

    Args:
        total: what earlier ones add up to; ``None``: this is the first.

    Returns:
        the sum.
    """
    return torch.mm(left, right) if total is None else total.addmm_(left, right)


def add_exponential_to(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Add exponentials, in place: of their sum, and of what is added to it, the logarithms are known.

    So the log-sum-exp of a row is made of those of its parts (Milakov and Gimelshein, "Online normalizer calculation
    for softmax", 2018).

    Args:
        total: the logarithm of the sum of earlier parts; -inf: there are none.
        part: of the same shape and dtype.

    Returns:
        the logarithm of the sum.
    """
    return torch.logaddexp(total, part, out=total)


SUMMING = frozenset({add_copy_to, add_exponential_to, add_product_to, add_to})
"""What adds to a sum, which is the first argument."""
