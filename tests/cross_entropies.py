"""Losses that read log-probabilities of labels, written in the ways in which users write them; of 40 classes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

__all__ = ["CLASS_WEIGHTS", "CROSS_ENTROPIES"]


def smoothed(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As the Trainer's label smoother does."""
    log_probabilities = -F.log_softmax(scores, dim=-1)
    column = labels.clamp(min=0).unsqueeze(-1)
    ignored = labels.unsqueeze(-1).eq(-100)
    of_labels = log_probabilities.gather(-1, column).masked_fill(ignored, 0.0)
    of_all = log_probabilities.sum(-1, keepdim=True).masked_fill(ignored, 0.0)
    return 0.9 * of_labels.sum() / 7 + 0.1 * of_all.sum() / 7 / scores.shape[-1]


def flat(**options: object) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), **options)  # type: ignore[arg-type]
        return (found * found.detach()).sum()

    return loss


CLASS_WEIGHTS = torch.arange(1.0, 41.0, dtype=torch.float64)
"""Of the classes, for a weighted loss."""

CROSS_ENTROPIES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": flat(),
    "sum": flat(reduction="sum"),
    "none": flat(reduction="none"),
    "smoothed": flat(label_smoothing=0.1),
    "smoothed, none": flat(label_smoothing=0.2, reduction="none"),
    "weights": flat(weight=CLASS_WEIGHTS),
    "weights, none": flat(weight=CLASS_WEIGHTS, reduction="none"),
    "another label ignored": lambda scores, labels: flat(ignore_index=3)(scores, labels.clamp(min=3)),
    "classes second": lambda scores, labels: F.cross_entropy(scores.transpose(1, 2), labels),
    "classes second, weights": lambda scores, labels: F.cross_entropy(scores.transpose(1, 2), labels, CLASS_WEIGHTS),
    "classes first": lambda scores, labels: F.nll_loss(
        F.log_softmax(scores.permute(2, 0, 1), 0).permute(1, 0, 2), labels
    ),
    "log-probabilities rearranged": lambda scores, labels: F.nll_loss(
        F.log_softmax(scores, -1).transpose(1, 2), labels, reduction="sum"
    ),
    "gathered": lambda scores, labels: -F.log_softmax(scores, -1).gather(-1, labels.clamp(min=0)[..., None]).mean(),
    "gathered twice": lambda scores, labels: (
        F.log_softmax(scores, -1).gather(-1, labels.clamp(min=0)[..., None]).mean()
        - 0.5 * F.log_softmax(scores, -1).gather(-1, (labels + 101)[..., None] % 40).square().mean()
    ),
    "label smoother": smoothed,
    "sum of everything": lambda scores, labels: F.log_softmax(scores, -1).sum() + labels.sum(),
    "sum over rows first": lambda scores, labels: (F.log_softmax(scores, -1).sum((0, 2)) * labels.sum(0)).sum(),
}
