"""The frontier of a plan has what tiles reach: budgets in bytes meet it, and the page tells it apart."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from roundpipe_fx.budget import bytes_text
from tests.planner.tiled import minimum
from tests.report.chromium import Page, needs_browser


class HeadAfterBlocks(nn.Module):
    """Blocks whose inner values are wide, and a loss head that is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 128) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(128, 16) for _ in range(3))
        self.head = nn.Linear(16, 1024)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return F.cross_entropy(self.head(x), y)


def _traced(**options: Any) -> roundpipe_fx.Plan:
    torch._dynamo.reset()
    torch.manual_seed(0)
    batch = {"x": torch.randn(512, 16), "y": torch.randint(1024, (512,))}
    return roundpipe_fx.compile(HeadAfterBlocks(), **options).trace(**batch)


@pytest.fixture(scope="module")
def plan() -> roundpipe_fx.Plan:
    return _traced(memory_budget=0.5)


def test_below_what_is_reached_without_there_are_plans_in_tiles(plan: roundpipe_fx.Plan) -> None:
    untiled, every = plan.frontier(tiles=False), plan.frontier()
    assert every[: len(untiled)] == untiled == _traced(memory_budget=0.5, tiling="never").frontier()
    tiled = every[len(untiled) :]
    assert tiled and max(size for size, _ in tiled) < min(size for size, _ in untiled)
    sizes, seconds = zip(*tiled, strict=True)
    assert list(sizes) == sorted(sizes, reverse=True) and list(seconds) == sorted(seconds)
    assert seconds[0] >= 0, "no operation is free on tiles"
    found = plan.look_into().alternatives
    assert [(own.bytes, own.seconds) for own in found.plans] == every
    assert [bool(own.tiles) for own in found.plans] == [point in set(tiled) for point in every]
    assert all("head" in own.tiles and max(own.curve) == own.bytes for own in found.plans if own.tiles)
    assert found.chosen is not None and not found.plans[found.chosen].tiles


@pytest.mark.long
def test_budgets_meet_them(plan: roundpipe_fx.Plan) -> None:
    tiled = plan.frontier()[len(plan.frontier(tiles=False)) :]
    least = minimum(HeadAfterBlocks(), {"x": torch.randn(512, 16), "y": torch.randint(1024, (512,))})
    # The peaks of emitted programs may differ by the values that they hold a little longer.
    assert tiled[-1][0] == pytest.approx(least, rel=0.01)
    for size, seconds in (tiled[0], tiled[len(tiled) // 2], tiled[-1]):
        met = _traced(memory_budget=max(size, least))
        assert met.tiles and met.peak_bytes <= max(size, least)
        assert met.point()[1] <= seconds + 0.02 * met.forward_seconds
        assert met.point()[0] == met.peak_bytes


def test_a_plan_in_tiles_has_the_same_frontier_and_its_own_plans(plan: roundpipe_fx.Plan) -> None:
    tiled = plan.frontier()[len(plan.frontier(tiles=False)) :]
    found = _traced(memory_budget=tiled[len(tiled) // 2][0])
    assert found.tiles and found.frontier(tiles=False)[-1] == plan.frontier(tiles=False)[-1]
    assert set(tiled) <= {*found.frontier(), *_dominated(found.frontier(), tiled)}
    details = found.look_into()
    assert details.alternatives.chosen is not None
    own = details.alternatives.plans[details.alternatives.chosen]
    assert own.tiles and own.seconds != found.recompute_seconds and found.point() == (found.peak_bytes, own.seconds)
    stored = roundpipe_fx.Plan.from_json(found.to_json())
    assert stored.look_into() == details and stored.point() == found.point()
    for tiles in (True, False):
        assert stored.frontier(tiles=tiles) == found.frontier(tiles=tiles)


def _dominated(by: list[tuple[int, float]], points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(size, time) for size, time in points if any(a <= size and b <= time for a, b in by)]


def test_where_tiles_are_taken_wherever_they_pay_no_plan_beats_another() -> None:
    plan = _traced(memory_budget=0.5, tiling="auto")
    whole, *points = plan.frontier()
    assert len(points) > 3 and whole == plan.frontier(tiles=False)[0] and whole[0] > points[0][0]
    for (size, seconds), (smaller, longer) in itertools.pairwise(points):
        assert smaller < size and longer > seconds


@pytest.mark.long
def test_where_tiles_are_taken_wherever_they_pay_budgets_meet_the_points() -> None:
    points = _traced(memory_budget=0.5, tiling="auto").frontier()
    for size, seconds in (points[len(points) // 3], points[len(points) // 2], points[-1]):
        met = _traced(memory_budget=size, tiling="auto")
        assert met.peak_bytes <= size and met.point()[1] <= seconds + 0.02 * met.forward_seconds


@pytest.mark.long
def test_a_plan_from_the_cache_looks_for_tiles_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROUNDPIPE_FX_CACHE", str(tmp_path))
    monkeypatch.setenv("ROUNDPIPE_FX_PLAN_CACHE", "1")
    first, second = _traced(memory_budget=0.5), _traced(memory_budget=0.5)
    assert list(tmp_path.rglob("*.json")) and second.frontier() == first.frontier()
    assert len(second.frontier()) > len(second.frontier(tiles=False))


def test_models_without_anything_to_tile_have_the_frontier_they_had() -> None:
    plan = roundpipe_fx.compile(nn.Linear(4, 4), memory_budget=1.0).trace(torch.randn(2, 4))
    assert plan.frontier() == plan.frontier(tiles=False)


@needs_browser
def test_the_page_says_what_is_in_tiles(plan: roundpipe_fx.Plan, tmp_path: Path, page: Page) -> None:
    page.open(plan.write_html(tmp_path / "plan.html"))
    page.click("#tab-frontier")
    page.click("#view-frontier canvas")
    page.press("End")
    found = plan.look_into().alternatives
    tiled = [own for own in found.plans if own.tiles]
    for own in found.plans:
        text = page.text("#view-frontier .panel")
        assert bytes_text(own.bytes) in text
        assert (f"Carried out in tiles, so sums round differently: {own.tiles}" in text) == bool(own.tiles)
        page.press("ArrowLeft")
    assert f", and {len(tiled)} plans in tiles" in page.text("#view-frontier .bar")
