"""The search for tiles: what is met without them is, and what an error names is met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from benchmarks.lower_bound import lower_bound
from roundpipe_fx.compiler import lower
from roundpipe_fx.remat.least_bytes import LeastBytes, least_bytes
from tests.compiler.test_tiling import CASES, Made
from tests.compiler.tiled import is_tiled, minimum
from tests.golden_models import GOLDEN
from tests.long import long_but

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    **{name: (make, make_batch) for name, (make, make_batch, _) in GOLDEN.items()},
    **{name: (lambda case=case: Made(case), case.inputs) for name, case in CASES.items()},
}


@pytest.mark.parametrize("name", long_but(MODELS, quick={"dropout_mlp", "unet", "tied", "attention dropout"}))
def test_a_budget_that_can_be_met_without_tiles_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one operation needs is below the peaks of all plans, and below the bound that weighs them all."""
    bounds: list[tuple[LeastBytes, int]] = []

    def noted(operations: Any) -> LeastBytes:
        bounds.append((least_bytes(operations), lower_bound(operations).bytes))
        return bounds[-1][0]

    make, make_batch = MODELS[name]
    torch.manual_seed(0)
    model, batch = make(), make_batch()
    budget = minimum(model, batch, tiling="never")
    torch._dynamo.reset()
    monkeypatch.setattr(lower, "least_bytes", noted)
    compiled = roundpipe_fx.compile(model, memory_budget=budget)
    compiled(**batch)
    assert bounds and not is_tiled(compiled) and compiled.plan.peak_bytes == budget
    for least, bound in bounds:
        assert 0 < least.bytes <= bound <= budget
        assert sum(size for _, size in least.live) >= least.bytes - least.operation.workspace


class HeadAndMLP(nn.Module):
    """A loss head, and an MLP whose inner values are narrower."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 128), nn.Linear(128, 16), nn.Linear(16, 512)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x), y)


def _batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(512, 16), "y": torch.randint(512, (512,))}


def test_no_plan_is_searched_for_below_what_one_operation_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    choose = lower.choose
    monkeypatch.setattr(lower, "choose", lambda *args, **kwargs: searched.append(args) or choose(*args, **kwargs))
    model, batch = HeadAndMLP(), _batch()
    budget = minimum(model, batch, tiling="never") // 2  # the logits and their gradients are most of it
    searched.clear()
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=budget)
    compiled(**batch)
    assert is_tiled(compiled) and len(searched) == 1


def test_a_refusal_searches_for_no_plan_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest peak of a graph with some regions in tiles does not depend on the budget, nor that it can be met."""
    peaks: list[int] = []
    met: list[Any] = []
    choose, within = lower.choose, lower._within

    def counted(*args: Any, **kwargs: Any) -> Any:
        chosen = choose(*args, **kwargs)
        if not chosen.fits:
            peaks.append(chosen.candidate.peak.bytes)
        return chosen

    monkeypatch.setattr(lower, "choose", counted)
    monkeypatch.setattr(lower, "_within", lambda *args, **kwargs: met.append(within(*args, **kwargs)) or met[-1])
    minimum(HeadAndMLP(), _batch())
    assert peaks and len(peaks) == len(set(peaks)) and not met


@pytest.mark.long
def test_what_an_error_names_is_met_from_wherever_it_was_asked() -> None:
    """Which tiles are tried depends on the budget, so errors for several budgets may name several minima."""
    model, batch = HeadAndMLP(), _batch()
    named = set()
    asked = [1, minimum(model, batch) // 3, minimum(model, batch) - 1]
    for budget in asked:
        torch._dynamo.reset()
        with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
            roundpipe_fx.compile(model, memory_budget=budget)(**batch)
        assert refused.value.minimum > budget
        assert str(refused.value).startswith(f"memory_budget of {budget} bytes")
        named.add(refused.value.minimum)
    for budget in named:
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(model, memory_budget=budget)
        compiled(**batch).backward()
        with roundpipe_fx.measure_peak("cpu") as peak:
            model.zero_grad()
            compiled(**batch).backward()
        assert is_tiled(compiled) and peak.bytes <= compiled.plan.peak_bytes <= budget


def test_tiles_are_as_many_as_the_budget_asks_for() -> None:
    model, batch = HeadAndMLP(), _batch()
    whole, least = minimum(model, batch, tiling="never"), minimum(model, batch)
    tiles = []
    for budget in (whole - 1, (whole + least) // 2, (whole + 3 * least) // 4, least):
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(model, memory_budget=budget)
        compiled(**batch)
        tiles.append(max(own.tiles for own in compiled.plan.tiles))
        assert compiled.plan.peak_bytes <= budget
    assert tiles == sorted(tiles) and tiles[0] < tiles[-1]
