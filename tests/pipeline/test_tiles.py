"""Pipelines whose budget only tiles meet."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.planner import lower_pipeline as lowering
from tests.planner.test_tiling_search import WideBlocks

WORDS = 512


class LanguageModel(nn.Module):
    """Its logits, from a tied head, are wider than all else; its MLPs come next."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width))
            for _ in range(depth)
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(F.linear(x, self.words.weight).flatten(0, 1), targets.flatten())


WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {"devices": ("cpu", "cpu"), "schedule": "1f1b"},
    "gpipe": {"devices": ("cpu", "cpu"), "schedule": "gpipe"},
    "zero bubble": {"devices": ("cpu", "cpu"), "schedule": "zero_bubble"},
    "roundpipe": {"devices": ("cpu", "cpu"), "schedule": "roundpipe"},
    "one worker": {},
}


def least(model: nn.Module, batch: dict[str, torch.Tensor], **options: Any) -> int:
    torch._dynamo.reset()
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        roundpipe_fx.compile(copy.deepcopy(model), memory_budget=1, **options).trace(**batch)
    return refused.value.minimum


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_the_least_budget_is_met_in_tiles(way: str) -> None:
    model = LanguageModel().double()
    tokens = torch.randint(0, WORDS, (8, 32))
    batch = {"tokens": tokens, "targets": tokens.roll(1, 1)}
    expected = model(**batch)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    options = {"num_microbatches": 4, **WAYS[way]}
    budget = least(model, batch, **options)
    assert budget < 0.6 * least(model, batch, tiling="never", **options)
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=budget, **options)
    compiled.trace(**batch)
    assert compiled.plan.tiles
    assert compiled.plan.peak_bytes <= budget
    loss = compiled.forward_backward(**batch)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    largest = max(gradient.norm() for gradient in gradients.values())
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert (p.grad - gradients[name]).norm() <= 1e-12 * largest, name


def test_no_schedule_is_searched_for_below_what_one_operation_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits and their gradient alone need more than the budget: nothing is planned that has them whole."""
    model = LanguageModel()
    tokens = torch.randint(0, WORDS, (8, 32))
    batch = {"tokens": tokens, "targets": tokens.roll(1, 1)}
    options = {"num_microbatches": 4, **WAYS["1f1b"]}
    budget = 2 * (8 // 4) * 32 * WORDS * 4 - 1
    planned = []
    plan = lowering._lower_for_schedules
    monkeypatch.setattr(lowering, "_lower_for_schedules", lambda *args: planned.append(args) or plan(*args))
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=budget, **options)
    compiled.trace(**batch)
    assert compiled.plan.tiles and planned
    for graph, *_ in planned:
        assert any(isinstance(node.target, TileLoop) for node in graph.graph.nodes)


@pytest.mark.parametrize("budget", [2_000_000, 0.0])
@pytest.mark.long
def test_tiles_that_pay_make_a_shorter_step(budget: int | float) -> None:
    """As on one device; the gradients are those of the model."""
    batch = {"x": torch.randn(4096, 16), "y": torch.randint(256, (4096,))}
    plans, gradients = [], []
    for tiling in (None, "auto"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiled = roundpipe_fx.compile(
            WideBlocks(), devices=("cpu", "cpu"), num_microbatches=4, memory_budget=budget, tiling=tiling
        )
        plans.append(compiled.trace(**batch))
        compiled.forward_backward(**batch)
        gradients.append([p.grad for p in compiled.parameters()])
    usual, shortest = (plan.pipeline for plan in plans)
    assert usual is not None and shortest is not None
    assert shortest.makespan < 0.99 * usual.makespan
    assert plans[0].budget is not None and max(shortest.peak_bytes) <= plans[0].budget
    largest = max(gradient.norm() for gradient in gradients[0])
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 1e-6 * largest
