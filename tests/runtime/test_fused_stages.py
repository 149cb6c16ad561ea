"""Gradients of stages in which operations are repeated beside their readers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundpipe_fx


class Net(nn.Module):
    """Norms, a dropout, a checkpoint, a buffer that is updated after it was read, and rounded indices."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.batch_norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.table = nn.Embedding(50, width)
        self.register_buffer("scale", torch.ones(width))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)).sin())

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))
        x = torch.relu(self.batch_norm(x)) * self.scale.exp()
        self.scale.mul_(0.9)
        x = x + checkpoint(self.inner, x, use_reentrant=False)
        x = x + self.table((x.detach().abs() * 7).long() % 50).mean(1)
        return F.cross_entropy(self.up(x), labels), x


def _step(run: Any, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model.zero_grad()
    torch.manual_seed(3)
    loss, x = run(*batch)
    (loss + 0.1 * x.square().mean()).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return gradients, [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("budget", [None, 0.0])
@pytest.mark.long
def test_gradients_are_those_of_eager_pytorch(budget: float | None) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    own = copy.deepcopy(model)
    batch = torch.randn(64, 32), torch.randint(128, (64,))
    run = roundpipe_fx.compile(own, memory_budget=budget, stage_compiler="inductor")
    for _ in range(2):
        gradients, buffers = _step(run, own, batch)
        expected, expected_buffers = _step(model, model, batch)
        largest = max(gradient.norm() for gradient in expected)
        for mine, its in zip(gradients, expected, strict=True):
            assert (mine - its).norm() < 1e-5 * (its.norm() + 1e-3 * largest)
        torch.testing.assert_close(buffers, expected_buffers)
