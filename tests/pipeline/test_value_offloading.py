"""Values that leave an offloaded model's device for the host. The host is a device of its own here: copies are made all
the same, so what is on the device can be counted."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.analysis.cost import DEVICES
from roundpipe_fx.pipeline.step import scheduled
from roundpipe_fx.runtime.host_buffers import HostBuffers
from roundpipe_fx.schedules import choose_offloads
from tests.comparison import Step, assert_bitwise
from tests.golden_models import GOLDEN
from tests.pipeline.steps import Blocks, left_behind, squares

pytestmark = pytest.mark.usefixtures("on_the_host")

WIDTH, ROWS = 32, 4096


def _stepped(
    model: nn.Module, budget: int | float, microbatches: int = 8, rows: int = ROWS
) -> tuple[Step, roundpipe_fx.Plan, int]:
    """A step's gradients, its plan, and the bytes that a step after the first one allocates at most."""
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(
        own, devices=["cpu"], num_microbatches=microbatches, memory_budget=budget, tiling="never"
    )
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    own.zero_grad()
    torch.manual_seed(0)
    with roundpipe_fx.measure_peak("cpu") as peak:
        loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
    return left_behind(own, loss), compiled.plan, peak.bytes


def test_what_fits_stays_and_what_does_not_leaves_with_the_same_bits() -> None:
    model = Blocks(WIDTH, 6, dropout=0.2)
    reference, ample, all_there = _stepped(model, 2**30)
    assert ample.timing.offloads == ()
    needed = ample.timing.peak_bytes[0]
    found, plan, measured = _stepped(model, needed // 2)
    assert_bitwise(found, reference)
    assert plan.timing.offloads and plan.timing.peak_bytes[0] <= needed // 2
    # What is planned beyond what is measured is the same with and without values that leave: workspaces.
    assert measured <= all_there - (needed - plan.timing.peak_bytes[0])


def test_stages_keep_their_windows_so_that_sums_keep_their_bits() -> None:
    model = Blocks(WIDTH, 4)
    x, y = torch.randn(2, 2048, WIDTH)

    def stepped(budget: float) -> tuple[Step, roundpipe_fx.Plan]:
        own = copy.deepcopy(model)
        compiled = roundpipe_fx.compile(
            own, devices=["cpu"], num_microbatches=8, schedule="1f1b", memory_budget=budget, tiling="never"
        )
        loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
        return left_behind(own, loss), compiled.plan

    reference, ample = stepped(1.0)
    found, plan = stepped(0.2)
    assert plan.recompute_seconds > 0 == ample.recompute_seconds
    assert len(plan.stages) == len(ample.stages)
    assert_bitwise(found, reference)


@pytest.mark.long
def test_a_smaller_budget_can_be_met_than_by_recomputing_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Blocks(WIDTH, 6)
    reference, _, _ = _stepped(model, 2**30)
    found, plan, _ = _stepped(model, 0.0)
    assert_bitwise(found, reference)
    monkeypatch.setattr(choose_offloads, "offloads_at_distance", lambda *args: ([], []))
    _, alone, _ = _stepped(model, 0.0)
    assert plan.timing.peak_bytes[0] < alone.timing.peak_bytes[0]


@pytest.mark.long
@pytest.mark.parametrize("name", ["tied_transformer", "mixture_of_experts", "encoder_decoder"])
def test_bits_of_models_with_skips_decisions_and_tied_weights(name: str) -> None:
    make, make_batch, _ = GOLDEN[name]
    torch.manual_seed(0)
    model = make()
    batch = {key: torch.cat([value] * 3) for key, value in make_batch().items()}
    steps, sent = [], []
    for budget in (1.0, 0.0):
        own = copy.deepcopy(model)
        compiled = roundpipe_fx.compile(own, devices=["cpu"], num_microbatches=3, memory_budget=budget)
        torch.manual_seed(0)
        steps.append(left_behind(own, compiled.forward_backward(**batch)))
        sent.append(sum(value.bytes for value in compiled.plan.timing.offloads))
    assert_bitwise(steps[1], steps[0])
    assert sent[0] == 0 < sent[1]


@pytest.mark.long
def test_buffers_are_kept_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[HostBuffers] = []
    take = HostBuffers.take

    def taken(self: HostBuffers, size: int) -> torch.Tensor:
        if self not in pools:
            pools.append(self)
        return take(self, size)

    monkeypatch.setattr(HostBuffers, "take", taken)
    model = Blocks(WIDTH, 4)
    x, y = torch.randn(2, 512, WIDTH)
    compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=4, memory_budget=0.0, loss_reduction="sum")
    sizes = []
    for rows in (512, 512, 511):  # the last one's microbatches have two sizes
        model.zero_grad()
        compiled.forward_backward(x[:rows], labels=y[:rows], loss_fn=squares)
        sizes.append(pools[0].bytes)
    assert len(pools) == 1 and 0 < sizes[0] == sizes[1]
    reference = copy.deepcopy(model)
    reference.zero_grad()
    squares(reference(x[:511]), y[:511]).backward()
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.long
def test_the_plan_counts_the_host_and_a_host_budget_is_kept_or_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Blocks(WIDTH, 4)
    x, y = torch.randn(2, 2048, WIDTH)

    def planned(host_budget: int | str | None) -> roundpipe_fx.Plan:
        compiled = roundpipe_fx.compile(
            model,
            devices=["cpu"],
            num_microbatches=8,
            memory_budget=12_000_000,
            tiling="never",
            host_budget=host_budget,
        )
        return compiled.trace(x, labels=y, loss_fn=squares)

    plan = planned(None)
    pipeline = plan.pipeline
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert pipeline.host_weight_bytes == pipeline.host_gradient_bytes == weights
    assert 0 < pipeline.host_value_bytes <= pipeline.sent_bytes
    assert plan.host_bytes == pipeline.host_bytes == 2 * weights + pipeline.host_value_bytes
    text = str(plan)
    assert f"{pipeline.sent_values} values" in text and "pinned on the host: " in text
    assert roundpipe_fx.Plan.from_json(plan.to_json()).pipeline == pipeline
    copies = plan.timeline().copies
    assert sum(copy.bytes for copy in copies if copy.what == "values") == 2 * pipeline.sent_bytes
    assert sum(copy.bytes for copy in copies if copy.what == "weights") == pipeline.host_to_device_bytes
    assert sum(copy.bytes for copy in copies if copy.what == "gradients") == sum(plan.timing.returned_bytes)
    assert all(0 <= copy.start < copy.end <= pipeline.makespan for copy in copies)
    assert all(own.bytes > 0 for own in copies) and {own.to_host for own in copies} == {True, False}
    assert roundpipe_fx.Plan.from_json(plan.to_json()).timeline().copies == copies
    events = json.loads(plan.timeline().write(tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat", "").startswith("copy of ") for event in events) == len(copies)
    recomputing = planned(2 * weights)  # no room for values
    assert recomputing.host_bytes == 2 * weights and recomputing.pipeline.sent_values == 0
    assert recomputing.recompute_seconds > plan.recompute_seconds
    assert plan.pipeline.makespan < recomputing.pipeline.makespan  # else nothing leaves:
    with monkeypatch.context() as slow:
        slow.setitem(DEVICES, "cpu", dataclasses.replace(DEVICES["cpu"], host=1e6))
        assert planned(None).pipeline.sent_values == 0
    with pytest.raises(roundpipe_fx.HostMemoryError, match=r"of memory on the host: .* for weights") as raised:
        planned(weights)
    assert planned(raised.value.needed).host_bytes <= raised.value.needed
    for wrong, error in ((1.0, TypeError), (True, TypeError), (-1, ValueError), ("much", ValueError)):
        with pytest.raises(error, match="host_budget"):
            planned(wrong)


@pytest.mark.long
def test_a_host_budget_is_for_microbatches_of_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is not divisible has buffers of two sizes: what they need together is refused if it is too much."""
    x, y = torch.randn(2, 2048, WIDTH)
    model = Blocks(WIDTH, 4)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    for room in (2**30, 2 * weights + 1):
        monkeypatch.setattr(scheduled, "host_budget_of", lambda *_, room=room: room)
        compiled = roundpipe_fx.compile(
            model,
            devices=["cpu"],
            num_microbatches=8,
            memory_budget=11_000_000,
            tiling="never",
            loss_reduction="sum",
            dynamic=False,
        )
        compiled.forward_backward(x, labels=y, loss_fn=squares)  # all have one size
        assert compiled.plan.timing.offloads
        compiled.zero_grad()
        if room == 2**30:
            compiled.forward_backward(x[:2044], labels=y[:2044], loss_fn=squares)
        else:
            with pytest.raises(roundpipe_fx.HostMemoryError, match="for values that leave the devices") as refused:
                compiled.forward_backward(x[:2044], labels=y[:2044], loss_fn=squares)
            assert refused.value.needed > room and all(p.grad is None for p in model.parameters())
        compiled.zero_grad()
