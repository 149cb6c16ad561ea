"""The plainest model that has stages."""

from __future__ import annotations

from torch import nn


def linear_chain(depth: int = 3, width: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
