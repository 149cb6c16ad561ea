"""A model that returns the scores of many classes beside its loss, as language models do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx

WORDS, TOKENS, WIDTH = 4096, 256, 32
SCORES = 4 * WORDS * TOKENS
"""Bytes of a batch's scores."""


class ScoringHead(nn.Module):
    """A few layers, and a loss over many classes, whose scores are returned too.

    Args:
        capped: whether scores are between -30 and 30, for which the backward reads them.
    """

    def __init__(self, width: int = WIDTH, capped: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(width, WORDS)
        self.capped = capped

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(self.layers(x))
        scores = 30 * torch.tanh(scores / 30) if self.capped else scores
        return F.cross_entropy(scores, y), scores


def make_head(
    tokens: int = TOKENS, width: int = WIDTH, capped: bool = True
) -> tuple[ScoringHead, torch.Tensor, torch.Tensor]:
    """Make a model and its batch, the same ones each time."""
    torch.manual_seed(0)
    return ScoringHead(width, capped), torch.randn(tokens, width), torch.randint(WORDS, (tokens,))


def drop(model: Any, *batch: Any, **named: Any) -> None:
    """Run a step whose loop takes the loss alone."""
    model(*batch, **named)[0].backward()


def measure(step: Callable[..., Any], own: nn.Module, *call: Any, **named: Any) -> int:
    """Measure the bytes of a step on the CPU that begins without gradients."""
    own.zero_grad(set_to_none=True)
    with roundpipe_fx.measure_peak("cpu") as peak:
        step(*call, **named)
    return peak.bytes


def least_budget(own: nn.Module, *batch: Any, **options: Any) -> int:
    """Read the least budget off the error that names it.

    Args:
        batch: arguments of the model; or one dict of them, by name.
    """
    named = batch[0] if isinstance(batch[0], dict) else {}
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        roundpipe_fx.compile(own, memory_budget=1, **options)(*(() if named else batch), **named)
    return refused.value.minimum
