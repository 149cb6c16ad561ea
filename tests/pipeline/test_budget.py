"""A byte budget of a pipeline is a device's; on one device the prediction is what is measured."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.codegen import stage_modules, stage_text
from roundpipe_fx.planner import fill_waits
from roundpipe_fx.planner import schedule_within_budget as within_budget
from tests import hugging_face
from tests.pipeline.steps import CPUS, SCHEDULES, Blocks, assert_close, batch_of, pipelined_step, squares


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.quick_every(5)
def test_no_step_allocates_more_than_predicted(schedule: str, checkpoint: str) -> None:
    x, y = batch_of(32, 32)
    for devices in (["cpu"], CPUS) if checkpoint == "always" else (["cpu"],):
        compiled = roundpipe_fx.compile(
            Blocks(32), devices=devices, num_microbatches=4, schedule=schedule, checkpoint=checkpoint
        )
        compiled.forward_backward(x, labels=y, loss_fn=squares)
        compiled.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            compiled.forward_backward(x, labels=y, loss_fn=squares)
        planned = compiled.plan.pipeline
        assert planned is not None and len(planned.peak_bytes) == len(devices)
        assert peak.bytes <= sum(planned.peak_bytes)
        # Two workers need not be at their peaks at the same time: how far below they stay depends on their timing.
        assert len(devices) == 2 or planned.peak_bytes[0] <= 1.05 * peak.bytes


@pytest.mark.parametrize("devices", [["cpu"], CPUS])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_outputs_that_are_returned_are_counted(devices: Sequence[str], microbatches: int) -> None:
    """In the end those of all microbatches are put together."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 512, bias=False))
    x = torch.randn(512, 8)
    compiled = roundpipe_fx.compile(
        model, devices=devices, num_microbatches=microbatches, memory_budget=1.0, tiling="never"
    )
    for _ in range(2):
        compiled.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            results = compiled.forward_backward(
                x, labels=x, loss_fn=lambda output, _: output.square().mean(), return_outputs=True
            )
        del results
    plan = compiled.plan
    assert peak.bytes <= sum(plan.pipeline.peak_bytes) and max(plan.pipeline.peak_bytes) <= plan.budget
    assert len(devices) == 2 or plan.pipeline.peak_bytes[0] <= 1.01 * peak.bytes


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("budget", [1.0, 0.0])
@pytest.mark.long
def test_all_forwards_before_all_backwards(schedule: str, budget: float) -> None:
    x, y = batch_of(64, 32)
    for devices in (["cpu"], CPUS) if budget == 0.0 else (["cpu"],):
        compiled = roundpipe_fx.compile(
            Blocks(32), devices=devices, num_microbatches=4, schedule=schedule, memory_budget=budget
        )
        for _ in range(2):
            with roundpipe_fx.measure_peak("cpu") as peak:
                squares(compiled(x), y).backward()
            compiled.zero_grad()
            plan = compiled.plan
            assert plan.pipeline is not None and plan.budget is not None
            assert peak.bytes <= sum(plan.pipeline.peak_bytes)
            assert len(devices) == 2 or plan.pipeline.peak_bytes[0] <= 1.15 * peak.bytes
            assert max(plan.pipeline.peak_bytes) <= plan.budget
        assert budget == 0.0 or plan.recompute_seconds == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "devices", "stages"), [("gpipe", CPUS, 2), ("1f1b", ["cpu"], 3), ("zero_bubble", CPUS, 2)]
)
def test_the_lowest_is_no_higher_than_with_checkpoints(schedule: str, devices: list[str], stages: int) -> None:
    model, batch = hugging_face.gpt2(layers=1), hugging_face.language_batch(batch=8, length=32)
    measured = {}
    for given in ({"memory_budget": 0.0, "tiling": "never"}, {"checkpoint": "always"}):
        compiled = roundpipe_fx.compile(
            copy.deepcopy(model), devices=devices, stages=stages, num_microbatches=8, schedule=schedule, **given
        )
        compiled.forward_backward(**batch)
        compiled.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            compiled.forward_backward(**batch)
        planned = compiled.plan.pipeline
        assert planned is not None and peak.bytes <= sum(planned.peak_bytes)
        measured[next(iter(given))] = max(planned.peak_bytes)
    assert measured["memory_budget"] <= measured["checkpoint"]


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
@pytest.mark.long
def test_at_the_peak_of_checkpoints_a_step_is_no_slower_than_theirs(schedule: str) -> None:
    x, y = batch_of(1024, 32)
    options = {"devices": CPUS, "num_microbatches": 16, "schedule": schedule}
    checkpoints = roundpipe_fx.compile(Blocks(32, 8), checkpoint="always", **options)
    theirs = checkpoints.trace(x, labels=y, loss_fn=squares).pipeline
    assert theirs is not None
    compiled = roundpipe_fx.compile(Blocks(32, 8), memory_budget=max(theirs.peak_bytes), **options)
    ours = compiled.trace(x, labels=y, loss_fn=squares).pipeline
    assert ours is not None and max(ours.peak_bytes) <= max(theirs.peak_bytes)
    assert ours.makespan <= theirs.makespan


def test_halfway_from_checkpoints_to_keeping_all_less_is_recomputed_under_dispatch() -> None:
    """RoundPipe's slots are not in the order of their layers: all layers may keep what there is room for."""
    x, y = batch_of(512, 32)
    options = {"devices": CPUS, "num_microbatches": 8, "schedule": "roundpipe"}
    plans = [
        roundpipe_fx.compile(Blocks(32, 8), **given, **options).trace(x, labels=y, loss_fn=squares)
        for given in ({"checkpoint": "always"}, {"checkpoint": "never"})
    ]
    always, never = (max(plan.pipeline.peak_bytes) for plan in plans)
    compiled = roundpipe_fx.compile(Blocks(32, 8), memory_budget=(always + never) // 2, **options)
    plan = compiled.trace(x, labels=y, loss_fn=squares)
    assert max(plan.pipeline.peak_bytes) <= plan.budget
    assert 0 < plan.recompute_seconds < 0.6 * plans[0].recompute_seconds


def test_gradients_do_not_stay_in_a_plan_of_microbatches() -> None:
    """From the second microbatch on the sums are there from the beginning: what is kept lies on top of all of them."""
    x, y = batch_of(512, 64)
    beyond_sums = []
    for options in ({"memory_budget": 0.0}, {"checkpoint": "never"}):
        model = Blocks(64, 8)
        compiled = roundpipe_fx.compile(model, num_microbatches=8, **options)
        compiled.forward_backward(x, labels=y, loss_fn=squares)
        compiled.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            compiled.forward_backward(x, labels=y, loss_fn=squares)
        beyond_sums.append(peak.bytes - sum(parameter.numel() * 4 for parameter in model.parameters()))
    assert 0 < beyond_sums[0] < 0.25 * beyond_sums[1]


@pytest.mark.long
def test_each_device_recomputes_what_its_microbatches_in_flight_ask_for() -> None:
    x, y = batch_of(512, 32)
    seconds = {}
    for schedule in ("1f1b", "gpipe"):
        kept = roundpipe_fx.compile(Blocks(32, 8), devices=["cpu"] * 4, num_microbatches=8, schedule=schedule)
        kept.forward_backward(x, labels=y, loss_fn=squares)
        planned = kept.plan.pipeline
        assert planned is not None
        highest, lowest = max(planned.peak_bytes), min(planned.peak_bytes)
        budget = (highest + lowest) // 2 if schedule == "1f1b" else highest * 2 // 3
        compiled = roundpipe_fx.compile(
            Blocks(32, 8), devices=["cpu"] * 4, num_microbatches=8, schedule=schedule, memory_budget=budget
        )
        compiled.forward_backward(x, labels=y, loss_fn=squares)
        planned = compiled.plan.pipeline
        assert planned is not None and max(planned.peak_bytes) <= budget
        seconds[schedule] = [stage.recompute_seconds for stage in compiled.plan.stages]
    # Under 1F1B the first device has four microbatches in flight, the last one.
    assert seconds["1f1b"][0] > 0 == seconds["1f1b"][-1]
    assert min(seconds["gpipe"]) > 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.long
def test_devices_recompute_while_they_wait(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = batch_of(256, 32)
    options = {"devices": CPUS, "num_microbatches": 8, "schedule": schedule, "memory_budget": 0.1}
    reference = Blocks(32, 8)
    models = [copy.deepcopy(reference) for _ in range(2)]
    early = roundpipe_fx.compile(models[0], **options)
    early.forward_backward(x, labels=y, loss_fn=squares)
    monkeypatch.setattr(fill_waits, "_MOST_FILLED", 0)
    late = roundpipe_fx.compile(models[1], **options)
    late.forward_backward(x, labels=y, loss_fn=squares)
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)
    ours, theirs = early.plan.pipeline, late.plan.pipeline
    assert ours is not None and theirs is not None and early.plan.budget == late.plan.budget
    assert re.search(r"\bR\d", ours.order) and not re.search(r"\bR\d", theirs.order)
    assert max(ours.peak_bytes) <= early.plan.budget
    assert ours.makespan < theirs.makespan


@pytest.mark.long
def test_a_budget_holds_with_the_microbatches_in_flight() -> None:
    model, batch = hugging_face.gpt2(layers=1), hugging_face.language_batch(batch=8, length=32)
    options = {"devices": ["cpu"], "stages": 2, "num_microbatches": 4, "schedule": "gpipe"}
    peaks = []
    for budget in (1.0, 0.4, 0.0):
        compiled = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=budget, **options)
        compiled.forward_backward(**batch)
        compiled.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            compiled.forward_backward(**batch)
        plan = compiled.plan
        assert plan.budget is not None and plan.pipeline is not None
        assert peak.bytes <= plan.pipeline.peak_bytes[0] <= plan.budget
        peaks.append(plan.pipeline.peak_bytes[0])
        assert (plan.recompute_seconds == 0) == (budget == 1.0)
    assert peaks[0] > peaks[1] > peaks[2]
    again = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=peaks[1], **options)
    again.trace(**batch)
    assert again.plan.pipeline is not None and again.plan.pipeline.peak_bytes[0] <= peaks[1]


@pytest.mark.long
def test_a_budget_holds_for_unequal_microbatches() -> None:
    """Each size is planned for itself, and together they fit; or not at all."""
    model, x, y = Blocks(32, 1), torch.randn(8, 64, 32), torch.randn(8, 64, 32)
    options = {"devices": ["cpu"], "stages": 1, "num_microbatches": 4, "schedule": "gpipe", "tiling": "never"}
    peaks = []
    for rows in (8, 4):
        equal = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=0.0, **options)
        plan = equal.trace(x[:rows], labels=y[:rows], loss_fn=squares).pipeline
        assert plan is not None
        peaks.append(plan.peak_bytes[0])
    x, given = x[:5], {"labels": y[:5], "loss_fn": squares}
    budget = peaks[0] * 11 // 10
    compiled = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=budget, **options)
    compiled.forward_backward(x, **given)
    compiled.zero_grad()
    with roundpipe_fx.measure_peak("cpu") as peak:
        compiled.forward_backward(x, **given)
    assert peak.bytes <= budget
    assert len(compiled.plans) > 2  # replanned
    compiled = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=peaks[1], **options)
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError):
        compiled.forward_backward(x, **given)
    assert all(parameter.grad is None for parameter in compiled.parameters())


@pytest.mark.parametrize(("rows", "microbatches", "outside"), [(101, 3, True), (510, 4, False)])
@pytest.mark.long
def test_the_least_budget_of_unequal_microbatches_can_be_met(rows: int, microbatches: int, outside: bool) -> None:
    """Under RoundPipe's dispatch together they need more than the larger ones alone."""
    model, x = Blocks(32, 3), torch.randn(rows, 32)
    options = {
        "devices": ["cpu"],
        "schedule": "roundpipe",
        "loss_reduction": "sum",
        "tiling": "never",
        "dynamic": False,
    }

    def with_budget(budget: int) -> roundpipe_fx.CompiledModule:
        own = copy.deepcopy(model)
        return roundpipe_fx.compile(own, num_microbatches=microbatches, memory_budget=budget, **options)

    def step(compiled: roundpipe_fx.CompiledModule, x: torch.Tensor) -> int:
        with roundpipe_fx.measure_peak("cpu") as peak:
            if outside:
                squares(compiled(x), x).backward()
            else:
                compiled.forward_backward(x, labels=x, loss_fn=squares)
        return peak.bytes

    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        step(with_budget(1), x)
    least = refused.value.minimum
    compiled = with_budget(least)
    assert step(compiled, x) <= least
    equal = torch.randn(-(-rows // microbatches) * microbatches, 32)  # whose plan may be known from the other step
    with contextlib.suppress(roundpipe_fx.InfeasibleBudgetError):
        assert step(compiled, equal) <= least


@pytest.mark.long
def test_the_least_budget_is_the_one_of_the_graph_that_dynamo_ends_with() -> None:
    """It traces the second size as one that varies, and, when both are planned for less, one graph for both sizes."""

    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            image = torch.tanh(self.first(x)).view(-1, 1, 4, 4)
            image = nn.functional.interpolate(image, scale_factor=2, mode="bilinear", align_corners=False)
            return self.second(torch.tanh(image.reshape(-1, 16))).square().mean()

    model, x = Scaling(), torch.randn(23, 16)

    def step(budget: int) -> int:
        torch._dynamo.reset()
        options: dict[str, Any] = {"devices": ["cpu"], "num_microbatches": 2, "schedule": "1f1b", "tiling": "never"}
        compiled = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=budget, **options)
        with roundpipe_fx.measure_peak("cpu") as peak:
            compiled(x).backward()
        return peak.bytes

    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        step(1)
    assert step(refused.value.minimum) <= refused.value.minimum


def test_a_budget_changes_no_bit() -> None:
    import torch

    x, y = batch_of(8)
    model = Blocks(dropout=0.1)
    losses = []
    for budget in (1.0, 0.0):
        own = copy.deepcopy(model)
        compiled = roundpipe_fx.compile(
            own, devices=CPUS, num_microbatches=4, loss_reduction="sum", memory_budget=budget
        )
        torch.manual_seed(3)
        loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
        losses.append((loss, [parameter.grad for parameter in own.parameters()]))
    assert torch.equal(losses[0][0], losses[1][0])
    assert all(torch.equal(a, b) for a, b in zip(losses[0][1], losses[1][1], strict=True))


def test_a_budget_that_no_plan_meets() -> None:
    x, y = batch_of(8)
    compiled = roundpipe_fx.compile(Blocks(), devices=CPUS, num_microbatches=4, memory_budget=1000)
    with pytest.raises(
        roundpipe_fx.InfeasibleBudgetError, match="schedule '1f1b', 2 devices and 4 microbatches"
    ) as caught:
        compiled.forward_backward(x, labels=y, loss_fn=squares)
    least = caught.value.minimum
    compiled = roundpipe_fx.compile(Blocks(), devices=CPUS, num_microbatches=4, memory_budget=least)
    compiled.forward_backward(x, labels=y, loss_fn=squares)


@pytest.mark.long
def test_auto_takes_the_shortest_step_that_fits() -> None:
    x, y = batch_of(16, 64)
    model = Blocks(64, 4)
    seconds, peaks = {}, {}
    for schedule in SCHEDULES:
        plan = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=8, schedule=schedule).trace(
            x, labels=y, loss_fn=squares
        )
        assert plan.pipeline is not None
        seconds[schedule], peaks[schedule] = plan.pipeline.makespan, max(plan.pipeline.peak_bytes)
    plan = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=8, schedule="auto").trace(
        x, labels=y, loss_fn=squares
    )
    assert plan.pipeline is not None
    assert plan.pipeline.makespan == pytest.approx(min(seconds.values()))
    assert plan.pipeline.schedule == min(seconds, key=lambda name: seconds[name])
    budget = sorted(peaks.values())[1]
    plan = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=8, schedule="auto", memory_budget=budget).trace(
        x, labels=y, loss_fn=squares
    )
    assert plan.pipeline is not None and max(plan.pipeline.peak_bytes) <= budget


class Gated(nn.Module):
    """What decides how much passes has no gradients: several segments without a backward of their own."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.gates, self.second = (
            nn.ModuleList(nn.Linear(width, width) for _ in range(depth)) for depth in (2, 3, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.first:
            x = layer(x).tanh()
        gate = x.detach()
        for layer in self.gates:
            gate = layer(gate).sigmoid() * gate
        x = x * gate.detach()
        for layer in self.second:
            x = layer(x).tanh()
        return x


@pytest.mark.long
@pytest.mark.parametrize(
    ("kept", "devices"),
    [({"memory_budget": 0.0}, 1), ({"memory_budget": 0.3, "tiling": "never"}, 3), ({"checkpoint": "always"}, 3)],
)
def test_segments_without_gradients(kept: dict[str, Any], devices: int) -> None:
    model, (x, y) = Gated(), batch_of(64, 32)
    given = {"labels": y, "loss_fn": squares, "num_microbatches": 2}
    reference, _ = pipelined_step(model, {"x": x}, devices=["cpu"], schedule="gpipe", **given)
    for schedule in SCHEDULES:
        step, compiled = pipelined_step(model, {"x": x}, devices=["cpu"] * devices, schedule=schedule, **given, **kept)
        assert_close(step, reference)
        assert schedule != "roundpipe" or compiled.plan.recompute_seconds > 0


@pytest.mark.long
def test_plans_that_are_tried_share_stage_modules_and_the_chosen_one_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = batch_of(512, 32)
    options = {"devices": CPUS, "num_microbatches": 8, "memory_budget": 0.4}
    made = 0
    graph_module, emit = stage_modules._make_graph_module, within_budget.emit

    def counted(*given: object) -> object:
        nonlocal made
        made += 1
        return graph_module(*given)

    monkeypatch.setattr(stage_modules, "_make_graph_module", counted)
    texts, counts = [], []
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(within_budget, "emit", lambda *given, known, **how: emit(*given, **how))
        compiled = roundpipe_fx.compile(Blocks(32, 8), **options)
        plan = compiled.trace(x, labels=y, loss_fn=squares)
        texts.append([*map(stage_text, plan.modules), str(plan), plan.details()])
        counts.append(made)
        made = 0
    assert texts[0] == texts[1] and counts[0] < counts[1]
