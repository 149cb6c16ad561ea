"""Gradients that no stage makes: an incoming gradient, a view of it, or something that the forward has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from tests.pipeline.steps import CPUS


class _Saved(torch.autograd.Function):
    """The second input's gradient does not depend on what arrives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient, (2 * x).sum(0) * weight


class _AddOne(nn.Module):
    def forward(self, x: torch.Tensor, _y: torch.Tensor) -> torch.Tensor:
        return x + 1


class _Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(3, 3), nn.Parameter(torch.randn(1, 3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + y.view(-1, 3) + self.table


class _Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(3, 3), nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _Saved.apply(self.linear(x) + y, self.weight)


def _squares(output: torch.Tensor) -> torch.Tensor:
    return (output - 0.3).square().sum()


@pytest.mark.parametrize("model", [_AddOne, _Skip, _Constant], ids=lambda model: model.__name__)
@pytest.mark.parametrize(
    "options",
    [
        {"num_microbatches": 2, "schedule": "zero_bubble"},
        {"num_microbatches": 4, "schedule": "1f1b", "recompute": "full"},
        {"num_microbatches": 3, "schedule": "roundpipe", "checkpoint": "except_last"},  # of 2, 1 and 1 rows
        {"num_microbatches": 4, "schedule": "gpipe", "memory_budget": 0.0},
    ],
    ids=lambda options: options["schedule"],
)
@pytest.mark.parametrize("inside", [True, False], ids=["loss inside", "loss outside"])
@pytest.mark.quick_every(2)
def test_gradients_that_no_stage_makes(model: type[nn.Module], options: dict[str, Any], inside: bool) -> None:
    reference = model()
    piped = copy.deepcopy(reference)
    compiled = roundpipe_fx.compile(piped, devices=CPUS, loss_reduction="sum", **options)
    rows = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
    others = [row.detach().clone().requires_grad_() for row in rows]
    _squares(reference(*rows)).backward()
    if inside:
        compiled.forward_backward(*others, loss_fn=_squares)
    else:
        _squares(compiled(*others)).backward()
    for own, other in zip([*rows, *reference.parameters()], [*others, *piped.parameters()], strict=True):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            torch.testing.assert_close(other.grad, own.grad)
