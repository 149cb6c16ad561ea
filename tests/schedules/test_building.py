"""A schedule from outside: who adds a specification in one place has a schedule like the others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.ir.options import Options
from roundpipe_fx.pipeline.settings import parse_pipelining
from roundpipe_fx.planner.lower_pipeline import _schedules_to_try
from roundpipe_fx.schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    InvalidScheduleError,
    Schedule,
    ScheduleSpec,
    StepCosts,
    chain,
    gpipe,
    zero_bubble,
)
from roundpipe_fx.schedules.building import make_schedule
from roundpipe_fx.schedules.registry import schedules_table
from tests.comparison import assert_bitwise
from tests.pipeline.steps import CPUS, Blocks, batch_of, left_behind, pipelined_step, squares


def breadth_first(devices: int, stages: int, microbatches: int) -> Schedule:
    """Lamy-Poirier, "Breadth-first pipeline parallelism", 2023: all microbatches through a stage, then the next."""
    orders = []
    for device in range(devices):
        mine = range(device, stages, devices)
        forwards = [Action(ActionKind.FORWARD, stage, batch) for stage in mine for batch in range(microbatches)]
        backwards = [Action(ActionKind.BACKWARD, stage, batch) for stage in mine[::-1] for batch in range(microbatches)]
        orders.append(forwards + backwards)
    return Schedule.of("breadth_first", orders)


SPEC = ScheduleSpec("breadth_first", breadth_first, 2, holds_all_microbatches=True, about="stage by stage")


@pytest.fixture(autouse=True)
def _added() -> Iterator[None]:
    SCHEDULES[SPEC.name] = SPEC
    yield
    del SCHEDULES[SPEC.name]


@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.5}, {"checkpoint": "except_last"}], ids=str)
def test_it_gets_its_stages_and_runs_with_the_bits_of_gpipe(options: dict[str, Any]) -> None:
    model, (x, y), steps = Blocks(dropout=0.1), batch_of(), {}
    for schedule, stages in ((SPEC.name, "auto"), ("gpipe", 4)):
        steps[schedule], compiled = pipelined_step(
            model,
            {"x": x},
            labels=y,
            loss_fn=squares,
            num_microbatches=4,
            schedule=schedule,
            stages=stages,
            **options,
        )
        assert len(compiled.plan.stages) == 4 and compiled.plan.pipeline.schedule == schedule
    assert_bitwise(steps[SPEC.name], steps["gpipe"])


class Remembering(nn.Module):
    """A layer reads what a later one has made in the previous call."""

    def __init__(self, reader: int, writer: int, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.register_buffer("memory", torch.zeros(8))
        self.register_buffer("calls", torch.zeros(()))
        self.reader, self.writer = reader, writer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for number, layer in enumerate(self.layers):
            if number == self.reader:
                x = x + self.memory * self.calls
            x = torch.tanh(layer(x))
            if number == self.writer:
                self.memory.mul_(0.5).add_(x.detach().mean(0))
        return x.sum()


@pytest.mark.filterwarnings("ignore:.*more than the .* segments")
@pytest.mark.parametrize(("reader", "writer", "stages"), [(3, 4, 4), (0, 1, 4), (0, 7, 1), (1, 6, 2)])
@pytest.mark.parametrize("called", ["forward_backward", "autograd", "evaluation"])
@pytest.mark.quick_every(3)
def test_buffers_across_stages(reader: int, writer: int, stages: int, called: str) -> None:
    model, x, steps = Remembering(reader, writer), torch.randn(8, 8), {}
    for schedule in (SPEC.name, "gpipe"):
        trained = copy.deepcopy(model)
        compiled = roundpipe_fx.compile(
            trained, devices=CPUS, num_microbatches=4, loss_reduction="sum", schedule=schedule, stages="auto"
        )
        for _ in range(2):
            if called == "forward_backward":
                loss = compiled.forward_backward(x)
            else:
                with torch.set_grad_enabled(called == "autograd"):
                    loss = compiled(x)
                if called == "autograd":
                    loss.backward()
        steps[schedule] = left_behind(trained, loss)
        if schedule == SPEC.name and called == "forward_backward":
            assert len(compiled.plan.stages) >= stages
    if called == "evaluation":
        assert torch.equal(steps[SPEC.name].loss, steps["gpipe"].loss)
        assert steps[SPEC.name].buffers["memory"].equal(steps["gpipe"].buffers["memory"])
    else:
        assert_bitwise(steps[SPEC.name], steps["gpipe"])


def test_a_specification_that_allows_what_its_order_does_not_is_refused() -> None:
    SCHEDULES[SPEC.name] = ScheduleSpec(SPEC.name, breadth_first, 2, updates_across_stages=True)
    compiled = roundpipe_fx.compile(Remembering(0, 7), devices=CPUS, num_microbatches=4, schedule=SPEC.name)
    with pytest.raises(InvalidScheduleError, match=r"device 0 waits at F0.1 for F3.0"):
        compiled.forward_backward(torch.randn(8, 8))


def test_errors_and_the_table_name_it() -> None:
    with pytest.raises(ValueError, match=r"valid values are 'gpipe', .*'breadth_first', 'auto', or"):
        roundpipe_fx.compile(Blocks(), devices=CPUS, schedule="depth_first")
    assert "| `breadth_first` | stage by stage |" in schedules_table()


@pytest.mark.parametrize("auto", [True, False])
def test_auto_tries_it_if_it_may(auto: bool) -> None:
    SCHEDULES[SPEC.name] = ScheduleSpec(SPEC.name, breadth_first, 2, auto=auto)
    pipelining = parse_pipelining(Options(), devices=["cpu"] * 2, num_microbatches=4, schedule="auto")
    assert pipelining is not None
    tried = _schedules_to_try(Options(), pipelining, training=True)
    assert (SPEC.name in {spec.name for spec in tried}) == auto


def test_devices_are_divided_for_it() -> None:
    x = torch.empty(8, 8)
    plan = roundpipe_fx.plan(Remembering(0, 1), x, device="H100", mesh_shape=2, num_microbatches=4, schedule=SPEC.name)
    divisions = {division.pipeline: division for division in plan.pipeline.mesh.divisions}
    assert {division.schedule for division in divisions.values()} == {SPEC.name}
    assert divisions[2].stages == 4


@pytest.mark.parametrize(("build", "splits"), [(zero_bubble, False), (gpipe, True)])
def test_halves_that_the_specification_does_not_tell_of(build: Any, splits: bool) -> None:
    spec = ScheduleSpec("mine", build, 1, splits)
    with pytest.raises(InvalidScheduleError, match=f"'mine' is built with actions of kind .* splits_backward={splits}"):
        make_schedule(spec, chain(2, split=splits), StepCosts(seconds={}), 2, 2)
