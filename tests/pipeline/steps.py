"""Pipelined steps to compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import roundpipe_fx
from tests.comparison import Step

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev", "roundpipe")
CPUS = ("cpu", "cpu")


class Blocks(nn.Module):
    """A chain of residual blocks; dropout where asked for."""

    def __init__(self, width: int = 16, depth: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def batch_of(rows: int = 8, width: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, width), torch.randn(rows, width)


def left_behind(model: nn.Module, loss: torch.Tensor) -> Step:
    return Step(
        loss.detach().clone(),
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
    )


def pipelined_step(
    model: nn.Module,
    batch: Mapping[str, Any],
    seed: int = 0,
    labels: torch.Tensor | None = None,
    loss_fn: Callable[..., Any] | None = None,
    **options: Any,
) -> tuple[Step, roundpipe_fx.CompiledModule]:
    """One ``forward_backward`` on a copy of the model, of a loss that is a sum."""
    model = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(model, **{"devices": CPUS, "loss_reduction": "sum", **options})
    torch.manual_seed(seed)
    given = batch if labels is None else {**batch, "labels": labels}
    loss = compiled.forward_backward(**given, loss_fn=loss_fn)
    return left_behind(model, loss), compiled


def assert_close(step: Step, reference: Step, tolerance: float = 1e-5) -> None:
    """Equal but for the order in which microbatches are added up."""
    torch.testing.assert_close(step.loss, reference.loss, rtol=tolerance, atol=tolerance)
    assert step.gradients.keys() == reference.gradients.keys()
    for name, gradient in step.gradients.items():
        expected = reference.gradients[name]
        assert (gradient is None) == (expected is None), name
        if gradient is not None and expected is not None:
            limit = tolerance * max(expected.abs().max().item(), 1e-30)
            assert (gradient - expected).abs().max().item() <= limit, name


def step_batch() -> dict[str, Any]:
    """Arguments of ``forward_backward``."""
    torch.manual_seed(1)
    x, y = batch_of()
    return {"x": x, "labels": y, "loss_fn": squares}
