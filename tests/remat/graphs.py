"""Operation graphs of random and real models, for testing planners."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roundpipe_fx.analysis.cost.roofline import DEVICES
from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.analysis.read_operations import read_operations
from roundpipe_fx.ir.joint_graph import JointGraph
from tests import listed
from tests.capturing import capture_joint

CPU = DEVICES["cpu"]


def staged(model: nn.Module, *inputs: Any, stages: int | str = "auto") -> tuple[JointGraph, int]:
    """A captured graph with segments and stages, and how many segments."""
    joint, _ = listed.staged(capture_joint(model, *inputs), stages)
    return joint, len(joint.segments)


def operations_of(model: nn.Module, *inputs: Any) -> OperationGraph:
    return read_operations(*staged(model, *inputs))


def mlp(depth: int = 4, width: int = 16) -> nn.Module:
    """Blocks with a residual: a chain of segments."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            self.dropout = nn.Dropout(0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.dropout(self.inner(self.norm(x)))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(depth)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x).square().mean()

    return Loss()
