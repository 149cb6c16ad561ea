"""Small models whose steps fit only in tiles, compiled for the least budget."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from tests.planner.tiled import minimum

WORDS = 256


class Head(nn.Module):
    """A small language model's end: a layer, logits, and a loss."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.scale = scale

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(x))) * self.scale, y)


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 256), nn.Linear(256, 8), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.dropout(F.gelu(self.up(x)), self.dropout, self.training)
        return (x + self.down(wide)).square().mean()


def batch(rows: int = 64, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 8, dtype=dtype), "y": torch.randint(0, WORDS, (rows,))}


def least(model: nn.Module, given: dict[str, torch.Tensor], **options: Any) -> roundpipe_fx.CompiledModule:
    """The model compiled for the least budget; in tiles."""
    budget = minimum(model, given, **options)
    torch._dynamo.reset()
    return roundpipe_fx.compile(model, memory_budget=budget, **options)


def both(model: nn.Module, given: dict[str, torch.Tensor]) -> tuple[nn.Module, roundpipe_fx.CompiledModule]:
    """A copy of the model, and the model compiled."""
    plain = copy.deepcopy(model)
    return plain, least(model, given)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    largest = max(g.double().norm() for g in expected)
    for own, other in zip(found, expected, strict=True):
        assert (own.double() - other.double()).norm() <= tolerance * largest
