"""Pipelines of stages by Inductor: planned bytes, held against what is allocated, and budgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from tests.runtime.test_compiled_memory import Blocks, Words, measured_peak


def _compiled(model: nn.Module, **options: Any) -> Any:
    """A pipeline on one device, since a process' memory does not say on which emulated device it is."""
    torch._dynamo.reset()
    return roundpipe_fx.compile(model, num_microbatches=4, devices=["cpu"], stage_compiler="inductor", **options)


@pytest.mark.parametrize("name", ["blocks", "words"])
@pytest.mark.long
def test_plans_say_what_is_allocated(name: str) -> None:
    """Sums of gradients and what is between microbatches included; the peaks fall with the budget."""
    torch.manual_seed(0)
    model, x = (
        (Blocks(), torch.randn(2048, 64)) if name == "blocks" else (Words(layers=1), torch.randint(4096, (16, 64)))
    )
    planned = []
    for budget in (None, 1.0, 0.5, 0.0):
        compiled = _compiled(model, memory_budget=budget)
        measured = measured_peak(compiled, x)
        plan = compiled.plan
        assert measured <= plan.peak_bytes <= 1.01 * measured
        assert plan.budget is None or plan.peak_bytes <= plan.budget
        planned.append(plan.peak_bytes)
    assert planned == sorted(planned, reverse=True) and planned[-1] < 0.5 * planned[0]


@pytest.mark.long
def test_what_a_refusal_names_is_met() -> None:
    """In bytes: the least is met, and one byte less is refused; with more, no more is recomputed."""
    model, x = Blocks(), torch.randn(2048, 64)

    def plan(budget: int) -> roundpipe_fx.Plan:
        return _compiled(model, memory_budget=budget, tiling="never").trace(x)

    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        plan(1)
    minimum = refused.value.minimum
    least = plan(minimum)
    assert least.peak_bytes == minimum == least.budget
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        plan(minimum - 1)
    assert refused.value.minimum == minimum
    more = plan(2 * minimum)
    assert minimum < more.peak_bytes <= 2 * minimum and more.recompute_seconds < least.recompute_seconds


@pytest.mark.long
def test_a_budget_that_operations_would_exceed_is_met() -> None:
    """A head's scores are written over, which only the code says."""
    model, x = Words(), torch.randint(4096, (16, 64))
    compiled = _compiled(model, memory_budget=9_000_000)
    assert measured_peak(compiled, x) <= compiled.plan.peak_bytes <= 9_000_000
