"""The search for tiles: what is met without them is, and what an error names is met."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from benchmarks.lower_bound import lower_bound
from roundpipe_fx.analysis.tiling import TileRegions
from roundpipe_fx.budget import Found
from roundpipe_fx.compiler.operations_in_tiles import split_means, tile_graph
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.passes import pipeline
from roundpipe_fx.planner import lower
from roundpipe_fx.planner import program_within_budget as within_budget
from roundpipe_fx.planner.evaluation import Space
from roundpipe_fx.remat.least_bytes import LeastBytes, least_bytes
from tests.golden_models import GOLDEN
from tests.long import long_but
from tests.planner.test_tiling import CASES, Made
from tests.planner.tiled import is_tiled, minimum

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
    monkeypatch.setattr(within_budget, "least_bytes", noted)
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
    choose = within_budget.choose
    monkeypatch.setattr(
        within_budget, "choose", lambda *args, **kwargs: searched.append(args) or choose(*args, **kwargs)
    )
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
    results: list[Any] = []
    choose, planned = within_budget.choose, within_budget.PROGRAMS.planned

    def counted(*args: Any, **kwargs: Any) -> Any:
        chosen = choose(*args, **kwargs)
        if not chosen.fits:
            peaks.append(chosen.candidate.peak.bytes)
        return chosen

    monkeypatch.setattr(within_budget, "choose", counted)
    noted = Space(planned=lambda *args: results.append(planned(*args)) or results[-1])
    monkeypatch.setattr(lower, "PROGRAMS", noted)
    minimum(HeadAndMLP(), _batch())
    assert peaks and len(peaks) == len(set(peaks))
    assert results and not any(isinstance(result, Found) for result in results)


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


class WideBlocks(nn.Module):
    """Blocks whose inner values are wide, and a head whose logits are less so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(16, 384) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(384, 16) for _ in range(3))
        self.head = nn.Linear(16, 256)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norm, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return F.cross_entropy(self.head(x), y)


def _seconds(budget: int, tiling: str | None) -> float:
    torch._dynamo.reset()
    batch = {"x": torch.randn(2048, 16), "y": torch.randint(256, (2048,))}
    plan = roundpipe_fx.compile(WideBlocks(), memory_budget=budget, tiling=tiling).trace(**batch)
    assert plan.peak_bytes <= budget
    return sum(own.forward_seconds + own.backward_seconds + own.recompute_seconds for own in plan.stages)


@pytest.mark.long
@pytest.mark.parametrize("budget", [3_500_000, 5_500_000])
def test_no_other_tiles_make_a_shorter_step(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it pays, held against all choices of the tiles of each region, by exhaustion."""
    steps: list[float] = []

    def by_exhaustion(joint: Any, budget: int, setting: Setting, space: Space[Any]) -> Any:
        graph = split_means(joint, setting)
        regions = TileRegions(graph).find_wide_regions(0)
        assert len(regions) == 4
        for numbers in itertools.product((1, 2, 4), repeat=len(regions)):
            tiles = [(region, number) for region, number in zip(regions, numbers, strict=True) if number > 1]
            result = space.planned(tile_graph(graph, tiles, setting) if tiles else joint, setting, budget, budget)
            if isinstance(result, Found):
                found = result
                steps.append(found.value.seconds)
        return found

    own = _seconds(budget, "auto")
    monkeypatch.setattr(lower, "search", by_exhaustion)
    _seconds(budget, "auto")
    assert len(steps) > 1 and own <= min(steps) * 1.001


@pytest.mark.parametrize("budget", [1_300_000, 2_000_000, 4_500_000])
@pytest.mark.quick_every(2)
def test_tiles_that_pay_make_a_shorter_step(budget: int) -> None:
    """The first plan within the budget has all blocks in as many tiles, and may recompute what more tiles spare."""
    assert _seconds(budget, "auto") < 0.96 * _seconds(budget, None)


class BlocksAndHead(nn.Module):
    """Blocks, each narrower than the one before, and a head that takes longer than all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 256), nn.Linear(256, width - 8)) for width in range(80, 16, -8)
        )
        self.head = nn.Linear(16, 8192)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), y)


def test_what_is_before_a_head_in_tiles_is_cut_as_finely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop computes gradients as well, beside which blocks that are run forward take little time."""
    segments: dict[bool, int] = {}
    cut = pipeline.cut_segments

    def noted(joint: Any, *args: Any) -> Any:
        joint, found = cut(joint, *args)
        segments[any(isinstance(node.target, TileLoop) for node in joint.computed())] = len(found)
        return joint, found

    monkeypatch.setattr(pipeline, "cut_segments", noted)
    batch = {"x": torch.randn(512, 80), "y": torch.randint(8192, (512,))}
    plan = roundpipe_fx.compile(BlocksAndHead(), memory_budget=12_000_000).trace(**batch)
    assert plan.tiles and segments[True] >= segments[False] > 5
