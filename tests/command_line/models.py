"""What the command line's tests name as ``module:function``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class WithLoss(nn.Module):
    """An MLP and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in "abc"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def mlp() -> tuple[nn.Module, Any]:
    """A model, and its batches: rows of so many vectors."""
    return WithLoss(), lambda rows, length: {"x": torch.empty(rows, length, 64)}


def alone() -> nn.Module:
    """A model without batches."""
    return WithLoss()


def number() -> int:
    """No model."""
    return 3


def broken() -> nn.Module:
    """A function with a mistake."""
    parts: dict[str, nn.Module] = {}
    return parts["no such part"]


def refusing() -> nn.Module:
    """A function that refuses its own settings."""
    raise ValueError("the width must be even")
