"""Pipelined steps show what their plan did not know, and the next one is planned with it."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from tests.analysis.cost.test_workspace import Greedy, greedy
from tests.golden_models import MixtureOfExperts
from tests.pipeline.steps import CPUS, Blocks, assert_close, batch_of, left_behind, pipelined_step, squares
from tests.test_memory_budget import _Scarce, _scarce


class Chain(nn.Sequential):
    """Blocks with an operator in the middle that is not PyTorch's own."""

    operator: Any

    def __init__(self) -> None:
        super().__init__(Blocks(depth=2), Blocks(depth=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](type(self).operator(self[0](x)))


class Greedily(Chain):
    operator = staticmethod(greedy)


class Scarcely(Chain):
    operator = staticmethod(_scarce)


def _experts() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return MixtureOfExperts(depth=2, experts=2), torch.randn(128, 8)


@pytest.mark.long
def test_sizes_that_depend_on_data_are_planned_with_as_they_were_seen() -> None:
    model, x = _experts()
    options: dict[str, Any] = {"devices": CPUS, "stages": 2, "num_microbatches": 2, "schedule": "1f1b"}
    options["loss_reduction"] = "sum"
    reference, _ = pipelined_step(copy.deepcopy(model), {"x": x}, checkpoint="always", **options)
    compiled = roundpipe_fx.compile(model, memory_budget=0.2, **options)
    threads = threading.active_count()
    compiled.forward_backward(x)
    bounded = compiled.plan
    assert not bounded.assumed
    model.zero_grad()
    loss = compiled.forward_backward(x)
    assert_close(left_behind(model, loss), reference)
    seen = compiled.plan
    assert seen.assumed and max(seen.assumed.values()) < 64
    assert seen.pipeline is not None and bounded.pipeline is not None
    assert max(seen.pipeline.peak_bytes) < max(bounded.pipeline.peak_bytes)
    plans = len(compiled.plans)
    model.zero_grad()
    with roundpipe_fx.measure_peak("cpu") as peak:
        compiled.forward_backward(x)
    assert len(compiled.plans) == plans
    assert peak.bytes <= sum(seen.pipeline.peak_bytes)
    with torch.no_grad():  # all tokens go to one expert now: more than was assumed
        for layer in model.layers:
            layer.router.bias[0] += 100
    model.zero_grad()
    compiled(x).backward()
    assert len(compiled.plans) > plans
    plans = len(compiled.plans)
    compiled.forward_backward(x)
    assert len(compiled.plans) > plans and max(compiled.plan.assumed.values()) == 67
    gc.collect()
    assert threading.active_count() <= threads + len(CPUS)  # the workers of earlier plans have ended


@pytest.mark.parametrize("devices", [["cpu"], CPUS])
def test_what_other_operators_need_is_seen_in_the_first_step(devices: list[str]) -> None:
    model = Greedily()
    x, y = batch_of(64)
    compiled = roundpipe_fx.compile(
        model, devices=devices, stages=2, num_microbatches=2, memory_budget=1.0, schedule="gpipe"
    )
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert not compiled.plan.assumed
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert compiled.plan.assumed["workspace of roundpipe_fx_tests.greedy.default"] >= 10 * 32 * 16 * 4
    model.zero_grad()
    with roundpipe_fx.measure_peak("cpu") as peak:
        compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert compiled.plan.pipeline is not None
    assert peak.bytes <= sum(compiled.plan.pipeline.peak_bytes)


def test_backwards_may_come_after_the_next_plan() -> None:
    model = Greedy()
    compiled = roundpipe_fx.compile(
        model, devices=["cpu"], stages=1, num_microbatches=1, loss_reduction="sum", memory_budget=1.0
    )
    batches = [torch.randn(16, 32) for _ in range(2)]
    expected = [torch.autograd.grad(model(x), list(model.parameters())) for x in batches]
    for loss, gradients in zip([compiled(x) for x in batches], expected, strict=True):
        found = torch.autograd.grad(loss, list(model.parameters()))
        for one, other in zip(found, gradients, strict=True):
            torch.testing.assert_close(one, other)
    assert compiled.plan.assumed


@pytest.mark.parametrize("way", ["forward_backward", "model"])
@pytest.mark.long
def test_running_out_of_memory_plans_once_more_with_less(way: str) -> None:
    x, y = batch_of(256)
    model = Scarcely()
    options: dict[str, Any] = {"devices": CPUS, "stages": 2, "num_microbatches": 2, "schedule": "gpipe"}

    def step(own: nn.Module, compiled: Any) -> Any:
        torch.manual_seed(0)
        if way == "forward_backward":
            return left_behind(own, compiled.forward_backward(x, labels=y, loss_fn=squares))
        loss = squares(compiled(x), y)
        loss.backward()
        return left_behind(own, loss)

    calm = copy.deepcopy(model)
    reference = step(calm, roundpipe_fx.compile(calm, checkpoint="never", **options))
    compiled = roundpipe_fx.compile(model, memory_budget=0.9, **options)
    _Scarce.failures = 1
    with pytest.warns(UserWarning, match="ran out of memory.*80% of the budget"):
        found = step(model, compiled)
    assert_close(found, reference)
    first, second = compiled.plans[0], compiled.plans[-1]
    assert first.budget is not None and second.budget is not None and second.budget < first.budget
    assert second.recompute_seconds > first.recompute_seconds


def test_running_out_of_memory_again_is_the_original_error() -> None:
    x, y = batch_of(256)
    compiled = roundpipe_fx.compile(Scarcely(), devices=CPUS, stages=2, num_microbatches=2, memory_budget=0.9)
    _Scarce.failures = 10
    try:
        with warnings.catch_warnings(), pytest.raises(torch.OutOfMemoryError, match="1 TiB"):
            warnings.simplefilter("ignore")
            compiled.forward_backward(x, labels=y, loss_fn=squares)
    finally:
        _Scarce.failures = 0


def test_without_a_budget_running_out_of_memory_is_an_error_at_once() -> None:
    x, y = batch_of(16)
    compiled = roundpipe_fx.compile(Scarcely(), devices=CPUS, stages=2, num_microbatches=2, checkpoint="always")
    _Scarce.failures = 1
    try:
        with warnings.catch_warnings(), pytest.raises(torch.OutOfMemoryError, match="1 TiB"):
            warnings.simplefilter("error", UserWarning)  # replanning would warn
            compiled.forward_backward(x, labels=y, loss_fn=squares)
    finally:
        _Scarce.failures = 0


class LossAndLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(x).relu().flatten(0, 0))
        return logits.logsumexp(-1).mean(), logits


def test_outputs_that_one_batch_differentiates_are_planned_with_for_any_batch() -> None:
    model = LossAndLogits()
    compiled = roundpipe_fx.compile(model, memory_budget=0.5)

    def step(rows: int) -> tuple[int, int]:
        gc.collect()
        x = torch.randn(rows, 16)
        with roundpipe_fx.measure_peak("cpu") as peak:
            loss, logits = compiled(x)
            (loss + ((logits - 1) ** 2).mean()).backward()
            del loss, logits
        model.zero_grad()
        return peak.bytes, compiled.plan.budget

    unexpected, budget = step(256)
    assert unexpected > budget
    for rows in (256, 512, 320):  # the second size makes sizes symbolic
        peak, budget = step(rows)
        assert peak <= budget, rows
