"""Devices of an offloaded model that share links to the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.analysis.cost import DEVICES
from tests.comparison import assert_bitwise
from tests.pipeline.steps import Blocks, left_behind, squares


class Summed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum()


@pytest.mark.parametrize("schedule", [None, "1f1b"])
@pytest.mark.quick_every(2)
def test_copies_take_longer_by_as_many_devices_as_share_a_link(schedule: str | None) -> None:
    with torch.device("meta"):
        model = Summed(Blocks(width=1024, depth=4))

    def planned(host_links: int | None) -> roundpipe_fx.Plan:
        return roundpipe_fx.plan(
            model,
            torch.empty(256, 1024, device="meta"),
            device="RTX 4090",
            devices=4,
            offloaded=True,
            num_microbatches=8,
            schedule=schedule,
            memory_budget=1.0,
            host_links=host_links,
        )

    seconds = []
    for links, sharing in ((None, 1), (8, 1), (3, 2), (1, 4)):
        plan = planned(links)
        copies = plan.timeline().copies
        assert len({own.device for own in copies}) == 4
        for own in copies:
            expected = own.bytes * sharing / DEVICES["RTX 4090"].host
            assert own.end - own.start == pytest.approx(expected)
        seconds.append(plan.pipeline.makespan)
    assert seconds[0] == seconds[1] < seconds[2] < seconds[3]


@pytest.mark.usefixtures("on_the_host")
def test_the_step_is_the_same() -> None:
    x, y = torch.randn(2, 32, 16)
    steps = []
    for links in (None, 1):
        torch.manual_seed(0)
        model = Blocks(depth=4)
        compiled = roundpipe_fx.compile(
            model, devices=["cpu", "cpu"], num_microbatches=4, stages=4, schedule="1f1b", host_links=links
        )
        steps.append(left_behind(model, compiled.forward_backward(x, labels=y, loss_fn=squares)))
    assert_bitwise(*steps)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"devices": ["cpu"], "host_links": 0}, ValueError, "at least one link"),
        ({"devices": ["cpu"], "host_links": True}, TypeError, "a number of links, not True"),
        ({"devices": ["cpu"], "host_links": 2.0}, TypeError, "a number of links, not 2.0"),
        ({"host_links": 1}, ValueError, "host_links is for a model on the CPU"),
    ],
)
def test_misuse(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        roundpipe_fx.compile(Blocks(), **given)


def test_misuse_of_plan() -> None:
    with pytest.raises(ValueError, match="give offloaded=True too"):
        roundpipe_fx.plan(Summed(Blocks()), torch.empty(4, 16), host_links=1)
