"""Planned memory of stages by Inductor, held against what is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import roundpipe_fx
from roundpipe_fx.runtime import compiled_memory

MOST = 1.01
"""The largest ratio of planned to allocated bytes."""


class Blocks(nn.Module):
    """Layers with dropout, whose masks are drawn again where they are recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Words(nn.Module):
    """A head with many words, whose scores die in the backward."""

    def __init__(self, words: int = 4096, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 32)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), layers, enable_nested_tensor=False
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.layers(self.words(tokens)) @ self.words.weight.t()
        return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


class Images(nn.Module):
    """Convolutions and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()) for _ in range(3))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "blocks": (Blocks, lambda: torch.randn(512, 64)),
    "words": (Words, lambda: torch.randint(4096, (4, 64))),
    "images": (Images, lambda: torch.randn(8, 8, 32, 32)),
}


def measured_peak(compiled: nn.Module, x: torch.Tensor) -> int:
    """Bytes that the second step allocates at most at one time."""
    for _ in range(2):
        compiled.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            compiled(x).backward()
    return peak.bytes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.long
def test_plans_say_what_is_allocated(name: str) -> None:
    """Without a budget and with each no less than is allocated, and hardly more; the peaks fall with the budget."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, x, planned = make(), inputs(), []
    for budget in (None, 1.0, 0.5, 0.0):
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(model, memory_budget=budget, stage_compiler="inductor")
        measured = measured_peak(compiled, x)
        assert len(compiled.plans) == 1  # nothing was learned
        plan = compiled.plan
        limit = math.inf if plan.budget is None else plan.budget
        assert measured <= plan.peak_bytes <= min(limit, MOST * measured)
        planned.append(plan.peak_bytes)
    assert planned == sorted(planned, reverse=True) and planned[-1] < 0.9 * planned[0]


@pytest.mark.long
def test_what_was_read_is_kept_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another process writes no code to know the same plan's peak."""
    monkeypatch.setenv("ROUNDPIPE_FX_CACHE", str(tmp_path))
    monkeypatch.setenv("ROUNDPIPE_FX_PLAN_CACHE", "1")
    x = torch.randn(64, 64)
    peaks = []
    for _ in range(2):
        torch._dynamo.reset()
        monkeypatch.setattr(compiled_memory, "_known", {})
        plan = roundpipe_fx.compile(Blocks(), memory_budget=0.0, stage_compiler="inductor").trace(x)
        peaks.append(plan.peak_bytes)
        monkeypatch.setattr(compiled_memory, "inductor_code", None)
    assert peaks[0] == peaks[1] and [*(tmp_path / "compiled_memory").glob("*.json")]


@pytest.mark.long
def test_code_that_plans_were_judged_by_is_not_written_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a backward, too, which runs in a thread of its own; only kernels are left to compile."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ROUNDPIPE_FX_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled_memory, "_known", {})
    compiled = roundpipe_fx.compile(Blocks(), memory_budget=0.5, stage_compiler="inductor")
    x = torch.randn(64, 64)
    compiled.trace(x)
    written = counters["inductor"]["fxgraph_cache_miss"]
    assert written
    compiled(x).backward()
    assert counters["inductor"]["fxgraph_cache_miss"] == written and counters["inductor"]["fxgraph_cache_hit"]


def test_a_plan_tells_of_buffers() -> None:
    plan = roundpipe_fx.compile(Blocks(), memory_budget=0.0, stage_compiler="inductor").trace(torch.randn(64, 64))
    assert "buffer of stage_" in str(plan) and plan.read_step is not None
    memory = plan.read_step().memory
    assert plan.peak.call.startswith("stage_") and max(moment.bytes for moment in memory.moments) == plan.peak_bytes
    assert {value.name for value in memory.values} > {value.name for value in memory.values if value.gradient} > set()


def test_code_that_cannot_be_followed_is_counted_by_its_operations(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*_: object) -> str:
        raise NotImplementedError("no code")

    monkeypatch.setattr(compiled_memory, "inductor_code", raises)
    monkeypatch.setattr(compiled_memory, "_known", {})
    monkeypatch.setenv("ROUNDPIPE_FX_PLAN_CACHE", "0")
    with caplog.at_level("INFO", logger="roundpipe_fx"):
        plan = roundpipe_fx.compile(Blocks(), memory_budget=1.0, stage_compiler="inductor").trace(torch.randn(64, 64))
    assert "cannot be read from Inductor's code: NotImplementedError: no code" in caplog.text
    assert "buffer of stage_" not in str(plan)
