"""The gradient of a negative log-likelihood in compiled stages: a comparison, which compilers fuse into what reads it.

PyTorch's decomposition writes numbers into zeros of the scores' size, which is then materialized, at a language model
the largest value of all::

    zeros(N, C).scatter(1, labels, -1) * gradient    →    where(arange(C) == labels, -gradient, 0)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_MEAN = 1


def _gradient_of_scores(
    gradient: torch.Tensor,
    scores: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total: torch.Tensor,
) -> torch.Tensor:
    """As ``aten.nll_loss_backward``, and for scores of more dimensions ``aten.nll_loss2d_backward``.

    Args:
        gradient: of the loss; of each label's loss without reduction.
        scores: log-probabilities: ``(C,)``, ``(N, C)`` or ``(N, C, …)``.
        labels: of the scores' shape without ``C``.
        weight: of each class: ``(C,)``.
        reduction: 0: none, 1: the mean, 2: the sum.
        ignored: the label whose loss does not count.
        total: the number of labels, or the sum of their weights, that a mean divides by.
    """
    dim = 0 if scores.dim() < 2 else 1
    row_gradient = gradient / total if reduction == _MEAN else gradient
    if row_gradient.dim() == labels.dim():
        row_gradient = row_gradient.unsqueeze(dim)
    numbers, counts = labels.unsqueeze(dim), (labels != ignored).unsqueeze(dim)
    if weight is not None:
        row_gradient = row_gradient * weight[torch.where(counts, numbers, 0)]
    shape = [-1 if position == dim else 1 for position in range(scores.dim())]
    classes = torch.arange(scores.shape[dim], device=scores.device).view(shape)
    return torch.where((classes == numbers) & counts, -row_gradient, 0).to(scores.dtype)


aten = torch.ops.aten

DECOMPOSITIONS: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.nll_loss_backward.default: _gradient_of_scores,
    aten.nll_loss2d_backward.default: _gradient_of_scores,
}
"""By operator, what a stage compiler gets in its place."""
