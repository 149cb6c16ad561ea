"""Tiles on a CUDA device: budgets that only they meet, of rows and of words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from benchmarks.fuzz.tiles import tiled_passes
from roundpipe_fx.codegen.loop_text import list_loops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Head(nn.Module):
    def __init__(self, words: int = 4096) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, words, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(x))).float(), y, ignore_index=3)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 2048), nn.Linear(2048, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x + self.down(F.gelu(self.up(x))), y % 64)


def _batch(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(1024, 64, device="cuda", dtype=dtype), "y": torch.randint(0, 4096, (1024,), device="cuda")}


def _gradients(run: Callable[..., Any], model: nn.Module, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    run(**given).backward()
    return [p.grad.double() for p in model.parameters()]


def _assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    largest = max(gradient.norm() for gradient in expected)
    for own, other in zip(found, expected, strict=True):
        assert (own - other).norm() <= tolerance * largest


@pytest.mark.parametrize(("make", "dtype"), [(Head, torch.float32), (Head, torch.bfloat16), (MLP, torch.float32)])
def test_the_least_budget_is_kept(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    model, given = make().cuda().to(dtype), _batch(dtype)
    plain = copy.deepcopy(model)
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        roundpipe_fx.compile(copy.deepcopy(model), memory_budget=1, stage_compiler="eager").trace(**given)
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=refused.value.minimum, stage_compiler="eager")
    found = _gradients(compiled, model, given)
    for _ in range(2):
        model.zero_grad()
        with roundpipe_fx.measure_peak("cuda") as peak:
            compiled(**given).backward()
    assert compiled.plan.tiles and peak.bytes <= compiled.plan.budget
    _assert_near(found, _gradients(plain, plain, given), 2.0**-7 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_loops_wait_for_nothing_on_the_host(by_class: bool, compiler: str) -> None:
    model, given = Head(512).cuda(), _batch(torch.float32)
    given["y"] = given["y"] % 512
    plain = copy.deepcopy(model)
    passes = tiled_passes(8, by_class)
    compiled = roundpipe_fx.compile(model, memory_budget=1.0, passes=passes, stage_compiler=compiler)
    found = _gradients(compiled, model, given)
    with roundpipe_fx.count_host_syncs() as asked:
        compiled(**given).backward()
    assert not asked.total
    loops = [loop for module in compiled.plan.modules for loop in list_loops(module.module.graph)]
    assert any(result.is_logarithm for loop in loops for result in loop.results) == by_class and loops
    _assert_near(found, _gradients(plain, plain, given), 1e-5)
