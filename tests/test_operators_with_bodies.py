"""Operators with bodies (``torch.cond``, ``scan``, ``while_loop``): bits, memory, and how often they run."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import roundpipe_fx
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step

Function = Callable[[torch.Tensor], torch.Tensor]


def _loop(x: torch.Tensor) -> torch.Tensor:
    """How often it runs, the host reads from data."""
    start = (torch.zeros((), dtype=torch.long), x.detach())
    return x * while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, (y * 1.1).sin()), start)[1]


def _scan(x: torch.Tensor) -> torch.Tensor:
    total, each = scan(lambda total, row: ((total + row).tanh(), (total * row).sin()), torch.zeros_like(x[0]), x)
    return each + total


def _dropout_in_scan(x: torch.Tensor) -> torch.Tensor:
    return scan(lambda count, row: (count + 1, F.dropout(row * 2, 0.5)), x[0], x)[1]


def _cond(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > -1e9, lambda x: (x * 2).exp().sin().exp(), lambda x: x.cos(), (x,))


class _Around(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.function(torch.tanh(self.first(x)))
        return self.second(torch.tanh(y * y)).square().mean()


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"memory_budget": 0.0}], ids=str)
@pytest.mark.parametrize("function", [_loop, _scan, _dropout_in_scan, _cond])
@pytest.mark.quick_every(3)
def test_bits(function: Function, options: dict[str, object]) -> None:
    model, batch = _Around(function), {"x": torch.randn(24, 16)}
    step, _ = compiled_step(model, batch, **options)
    assert_bitwise(step, aot_eager_step(model, batch))


@pytest.mark.parametrize(
    ("function", "result", "why"),
    [
        (_cond, "getitem", "the host reads its condition"),
        (_loop, "getitem_1", "the host reads its condition"),
        (_dropout_in_scan, "getitem_1", "its body draws random numbers"),
    ],
)
def test_what_must_not_run_twice_is_saved(function: Function, result: str, why: str) -> None:
    plan = roundpipe_fx.compile(_Around(function), recompute="full").trace(torch.randn(24, 16))
    assert f"never recomputed: {why}" in plan.explain(result)


def _dropout_in_cond(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > -1e9, lambda x: F.dropout(x * 2, 0.5), lambda x: x.cos(), (x,))


def test_a_body_that_draws_again_in_the_backward_is_told_of() -> None:
    """Where PyTorch's own gradients have another mask, eagerly too."""
    x = torch.rand(24, 16, requires_grad=True) + 0.5
    x.retain_grad()
    dropped = _dropout_in_cond(x)
    dropped.sum().backward()
    assert not torch.equal(x.grad != 0, dropped != 0)
    for options in ({}, {"num_microbatches": 2}):
        model = _Around(_dropout_in_cond)
        with pytest.warns(UserWarning, match="draws random numbers"):
            roundpipe_fx.compile(model, **options).trace(torch.randn(24, 16))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "roundpipe_fx")
        roundpipe_fx.compile(_Around(_dropout_in_scan)).trace(torch.randn(24, 16))


@pytest.mark.parametrize("function", [_scan, _cond])
def test_memory_of_bodies_is_known_after_the_first_step(function: Function) -> None:
    model, x = _Around(function), torch.randn(24, 16)
    budget = 1
    for _ in range(3):
        compiled = roundpipe_fx.compile(model, memory_budget=budget, tiling="never")
        with contextlib.suppress(roundpipe_fx.InfeasibleBudgetError):
            compiled(x).backward()
        try:
            with roundpipe_fx.measure_peak("cpu") as peak:
                compiled(x).backward()
        except roundpipe_fx.InfeasibleBudgetError as error:
            budget = error.minimum
        else:
            assert peak.bytes <= budget
            return
    pytest.fail(f"the least budget that was named last, {budget} bytes, was refused")


@pytest.mark.long
def test_smaller_budgets_have_no_higher_peaks() -> None:
    peaks = []
    for budget in (0.0, 0.5, 1.0):
        model, x = _Around(_scan), torch.randn(24, 16)
        compiled = roundpipe_fx.compile(model, memory_budget=budget, tiling="never")
        compiled(x).backward()
        model.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            compiled(x).backward()
        peaks.append(peak.bytes)
    assert peaks == sorted(peaks)
