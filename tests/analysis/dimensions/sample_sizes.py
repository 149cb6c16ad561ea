"""Sizes that tests of operators vary, and operands of these sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.analysis.dimensions.calls import RealCall


@dataclass(frozen=True)
class Sizes:
    """Sizes to make shapes of, all different in general."""

    a: int
    b: int
    c: int
    d: int


Sample = Callable[[Sizes], RealCall]


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def inner(*shape: int) -> torch.Tensor:
    """Numbers between 0 and 1."""
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def whole(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(most, shape)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.5
