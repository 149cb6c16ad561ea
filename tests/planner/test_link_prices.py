"""What an offloaded model saves by the price of its link. The host is a device of its own here."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import roundpipe_fx
from roundpipe_fx.analysis.cost import DEVICES
from roundpipe_fx.planner import schedule_within_budget as within_budget
from roundpipe_fx.planner.evaluation import ScheduleEvaluation
from roundpipe_fx.planner.link_prices import LinkPrices
from tests.pipeline.steps import Blocks, squares

pytestmark = pytest.mark.usefixtures("on_the_host")

WIDTH, ROWS, MICROBATCHES = 32, 4096, 8


def _planned(budget: int) -> roundpipe_fx.Plan:
    torch.manual_seed(0)
    compiled = roundpipe_fx.compile(
        Blocks(WIDTH, 6, dropout=0.2),
        devices=["cpu"],
        num_microbatches=MICROBATCHES,
        memory_budget=budget,
        tiling="never",
    )
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    return compiled.trace(x, labels=y, loss_fn=squares)


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that carries about half of what could leave beside the device's work."""
    monkeypatch.setitem(DEVICES, "cpu", dataclasses.replace(DEVICES["cpu"], host=4e9))


@pytest.mark.usefixtures("slow_link")
@pytest.mark.long
def test_plans_by_the_price_of_the_link_are_as_short_as_others_or_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = _planned(2**30).timing.peak_bytes[0]
    shares = (0.45, 0.6)
    priced = [_planned(int(needed * share)) for share in shares]
    monkeypatch.setattr(within_budget, "search_link_prices", lambda *args: [])
    others = [_planned(int(needed * share)) for share in shares]
    for share, plan, other in zip(shares, priced, others, strict=True):
        assert plan.timing.peak_bytes[0] <= needed * share
        assert plan.timing.makespan <= other.timing.makespan


def test_the_chain_counts_a_plan_that_saves_everything_as_the_simulation_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the bytes beside it are what the simulation counts and the chain does not."""
    seen: list[tuple[LinkPrices, ScheduleEvaluation]] = []
    initialize = LinkPrices.__init__

    def noted(self: LinkPrices, **arguments: Any) -> None:
        initialize(self, **arguments)
        seen.append((self, arguments["first"]))

    monkeypatch.setattr(LinkPrices, "__init__", noted)
    needed = _planned(2**30).timing.peak_bytes[0]
    _planned(needed // 2)
    prices, first = seen[0]
    saved = [stage.options[0].held for stage in prices._chain.stages]
    before = 0
    most = 0
    for stage, segment, held in zip(prices._chain.stages, prices._segments, saved, strict=True):
        others = before + (segment.in_flight - 1) * held
        ahead = stage.options[0].forward + stage.resident_forward + segment.forward
        back = stage.options[0].backward + stage.resident + segment.backward
        most = max(most, others + ahead, others + back)
        before += segment.in_flight * held
    assert most == first.peak
    assert {segment.in_flight for segment in prices._segments} == {1, MICROBATCHES}
    assert not prices._segments[-1].may_leave and prices._segments[1].may_leave
