"""Pipelined steps compute what steps compute."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import roundpipe_fx
from tests import hugging_face
from tests.comparison import Step, aot_eager_step, assert_bitwise, train_step
from tests.golden_models import GOLDEN
from tests.pipeline.steps import (
    CPUS,
    SCHEDULES,
    Blocks,
    assert_close,
    batch_of,
    left_behind,
    pipelined_step,
    squares,
)


@functools.cache
def _golden(name: str) -> tuple[nn.Module, Mapping[str, Any], Step]:
    """A model, which is only copied, its batch and the reference."""
    torch.manual_seed(0)
    make, make_batch, _ = GOLDEN[name]
    model, batch = make(), make_batch()
    return model, batch, aot_eager_step(model, batch)


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize(
    ("schedule", "checkpoint"), [("zero_bubble", "always"), ("roundpipe", "always"), ("1f1b", "never")]
)
@pytest.mark.quick_every(7)
def test_one_microbatch_has_the_bits_of_aot_eager(name: str, schedule: str, checkpoint: str) -> None:
    """Skips (U-Net, encoder-decoder), tied weights, dropout, nonzero, batch norm: one property a model."""
    model, batch, reference = _golden(name)
    step, _ = pipelined_step(model, batch, num_microbatches=1, schedule=schedule, checkpoint=checkpoint)
    assert_bitwise(step, reference)


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.quick_every(2)
def test_through_autograd_too(name: str) -> None:
    model, batch, reference = _golden(name)
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(own, devices=CPUS, num_microbatches=1, checkpoint="always")
    assert_bitwise(train_step(compiled, own, batch), reference)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "schedules"),
    [
        ("gpt2", ("zero_bubble", "roundpipe")),
        ("t5", ("1f1b",)),
        ("qwen3_moe", ("zero_bubble",)),
        ("resnet", ("roundpipe",)),
    ],
)
def test_hugging_face_models(name: str, schedules: tuple[str, ...]) -> None:
    make, make_batch = hugging_face.MODELS[name]
    model, batch = make() if name == "resnet" else make(layers=1), make_batch()
    reference = hugging_face.reference_step(name, model, batch)
    for schedule in schedules:
        step, compiled = pipelined_step(model, batch, num_microbatches=1, schedule=schedule)
        assert_bitwise(step, reference)
    torch.manual_seed(0)
    again = compiled.forward_backward(**batch)
    assert torch.equal(again, reference.loss)


@functools.cache
def _with_dropout() -> tuple[nn.Module, Mapping[str, Any], Step]:
    """A model, which is only copied, arguments of its step, and the step on one device, which keeps everything."""
    torch.manual_seed(0)
    model, (x, y) = Blocks(dropout=0.2), batch_of(8)
    given = {"batch": {"x": x}, "labels": y, "loss_fn": squares, "num_microbatches": 4}
    return model, given, pipelined_step(model, schedule="gpipe", devices=["cpu"], **given)[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.quick_every(6)
def test_schedules_devices_and_recomputation_change_no_bit(schedule: str) -> None:
    """But for RoundPipe's dispatch, where several devices add up what is one stage's, so in another order."""
    model, given, reference = _with_dropout()
    for checkpoint, devices in (("never", ["cpu"] * 3), ("except_last", CPUS), ("always", ["cpu"] * 3)):
        step, _ = pipelined_step(model, schedule=schedule, checkpoint=checkpoint, devices=devices, **given)
        if schedule == "roundpipe":
            assert torch.equal(step.loss, reference.loss)
            assert_close(step, reference)
        else:
            assert_bitwise(step, reference)


@given(
    rows=st.integers(2, 9),
    microbatches=st.integers(1, 5),
    schedule=st.sampled_from(SCHEDULES),
    checkpoint=st.sampled_from(["never", "except_last", "always"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None)
@pytest.mark.filterwarnings("ignore:roundpipe_fx. a batch of")
@pytest.mark.long
def test_microbatches_add_up_to_the_batch(
    rows: int, microbatches: int, schedule: str, checkpoint: str, seed: int
) -> None:
    torch.manual_seed(seed)
    torch._dynamo.reset()
    model, (x, y) = Blocks(depth=3), batch_of(rows)
    own = copy.deepcopy(model)
    loss = squares(own(x), y)
    loss.backward()
    step, _ = pipelined_step(
        model,
        {"x": x},
        labels=y,
        loss_fn=squares,
        num_microbatches=microbatches,
        schedule=schedule,
        checkpoint=checkpoint,
    )
    assert_close(step, left_behind(own, loss))


def test_through_autograd_microbatches_add_up_and_outputs_are_merged() -> None:
    model, (x, y) = Blocks(), batch_of(7)
    x.requires_grad_()
    own, own_x = copy.deepcopy(model), x.detach().clone().requires_grad_()
    output = own(own_x)
    loss = squares(output, y)
    loss.backward()
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=3, loss_reduction="sum")
    found = compiled(x)
    torch.testing.assert_close(found, output)
    found_loss = squares(found, y)
    found_loss.backward()
    assert_close(left_behind(model, found_loss), left_behind(own, loss))
    torch.testing.assert_close(x.grad, own_x.grad)


def test_gradients_of_inputs_reach_what_made_them() -> None:
    model, (x, y) = Blocks(), batch_of(8)
    before = nn.Linear(16, 16)
    squares(model(before(x)), y).backward()
    expected = before.weight.grad.clone()
    model.zero_grad()
    before.zero_grad()
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=4, loss_reduction="sum")
    compiled.forward_backward(before(x), labels=y, loss_fn=squares)
    torch.testing.assert_close(before.weight.grad, expected)


def test_gradients_accumulate_and_hooks_run() -> None:
    model, (x, y) = Blocks(), batch_of(8)
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=4, loss_reduction="sum")
    seen: list[nn.Parameter] = []
    parameter = model.layers[2][0].weight
    parameter.register_post_accumulate_grad_hook(seen.append)
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    once = parameter.grad.clone()
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert torch.equal(parameter.grad, 2 * once)
    assert len(seen) == 2 and seen[0] is parameter


def test_the_outputs_beside_the_loss() -> None:
    model, (x, y) = Blocks(), batch_of(8)
    expected = model(x)
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=4, loss_reduction="sum")
    loss, output = compiled.forward_backward(x, labels=y, loss_fn=squares, return_outputs=True)
    torch.testing.assert_close(output, expected)
    assert not output.requires_grad and not loss.requires_grad
    torch.testing.assert_close(loss, squares(expected, y).detach())


def test_the_models_own_outputs_come_back_as_its_own_type() -> None:
    model, batch = hugging_face.gpt2(), hugging_face.language_batch(batch=4)
    model.eval()
    expected = model(**batch)
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=2)
    loss, output = compiled.forward_backward(**batch, return_outputs=True)
    assert type(output) is type(expected)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-4, atol=1e-5)
    found = compiled(**batch)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_new_loss_functions_of_the_same_code_do_not_recompile() -> None:
    model, (x, y) = Blocks(), batch_of(8)
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=4)
    for _ in range(3):
        compiled.forward_backward(x, labels=y, loss_fn=lambda output, target: F.mse_loss(output, target))
    assert len(compiled.plans) == 1


def test_a_model_trains() -> None:
    torch.manual_seed(0)
    model, (x, y) = Blocks(dropout=0.1), batch_of(16)
    compiled = roundpipe_fx.compile(
        model, devices=CPUS, num_microbatches=4, schedule="zero_bubble", checkpoint="always"
    )
    optimizer = torch.optim.Adam(compiled.parameters(), 3e-3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(compiled.forward_backward(x, labels=y, loss_fn=squares).item())
        optimizer.step()
    assert losses[-1] < losses[0] / 2


class Mutating(nn.Module):
    """Counts rows in a buffer, notes an attribute, and freezes a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.register_buffer("rows", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = torch.relu(self.first(x))
        self.rows += x.shape[0]
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.last(torch.relu(self.frozen(x)))


@pytest.mark.parametrize("schedule", ["1f1b", "roundpipe"])
@pytest.mark.long
def test_buffers_are_updated_microbatch_by_microbatch(schedule: str) -> None:
    model, (x, y) = Mutating(), batch_of(8, 8)
    own = copy.deepcopy(model)
    total = sum(squares(own(a), b) for a, b in zip(x.split(2), y.split(2), strict=True))
    total.backward()
    compiled = roundpipe_fx.compile(
        model, devices=CPUS, num_microbatches=4, loss_reduction="sum", schedule=schedule, checkpoint="always"
    )
    loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert_close(left_behind(model, loss), left_behind(own, total))
    assert torch.equal(model.rows, own.rows) and torch.equal(model.mean, own.mean)
    assert model.seen == own.seen == 4
    assert model.frozen.weight.grad is None
    squares(compiled(x), y).backward()
    for piece in x.split(2):
        own(piece)
    assert torch.equal(model.rows, own.rows) and torch.equal(model.mean, own.mean)


def test_autocast() -> None:
    model, (x, y) = Blocks(), batch_of(8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = squares(model(x).float(), y)
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=1, loss_reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        loss = compiled.forward_backward(x, labels=y, loss_fn=lambda output, target: squares(output.float(), target))
    assert torch.equal(loss, expected.detach())


def test_eval_and_inference() -> None:
    model, (x, y) = Blocks(dropout=0.3), batch_of(8)
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=4, loss_reduction="sum")
    compiled.eval()
    expected = model(x)
    torch.testing.assert_close(compiled(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), expected)
    loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
    torch.testing.assert_close(loss, squares(expected, y).detach())
    for parameter in model.parameters():
        assert parameter.grad is not None


def test_a_backward_that_uses_only_some_outputs() -> None:
    class Two(Blocks):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
            y = super().forward(x)
            return y, y.sum(1), 3

    model, (x, _) = Two(), batch_of(8)
    own = copy.deepcopy(model)
    own(x)[1].sum().backward()
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=4, loss_reduction="sum")
    _, sums, three = compiled(x)
    assert three == 3
    sums.sum().backward()
    for found, expected in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_a_copy_and_a_pickle_are_pipelined_too(tmp_path) -> None:
    model, (x, y) = Blocks(), batch_of(8)
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=4, loss_reduction="sum")
    loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
    torch.save(compiled, tmp_path / "model.pt")
    for other in (copy.deepcopy(compiled), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(other.forward_backward(x, labels=y, loss_fn=squares), loss)


def test_trace_runs_nothing() -> None:
    model, (x, y) = Mutating(), batch_of(8, 8)
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=4)
    orders = []
    for step in ({}, {"labels": y, "loss_fn": squares}):
        plan = compiled.trace(x, **step)
        assert plan.pipeline is not None and len(plan.pipeline.peak_bytes) == 2
        assert model.rows == 0
        orders.append("".join(word[0] for word in plan.pipeline.order.splitlines()[0].split() if word[0] in "FB"))
    assert orders == ["FFFFBBBB", "FFBFBFBB"], "a call runs all forwards first"


class ReadLate(nn.Module):
    """Updates a buffer at its beginning and reads what it was at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("level", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.level.clone()
        self.level.add_(x.detach().mean(0))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x * before


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "roundpipe"])
def test_a_late_stage_reads_the_state_of_its_own_microbatch(schedule: str) -> None:
    model, (x, y) = ReadLate(), batch_of(12, 8)
    own = copy.deepcopy(model)
    total = sum(squares(own(a), b) for a, b in zip(x.split(2), y.split(2), strict=True))
    total.backward()
    compiled = roundpipe_fx.compile(
        model, devices=CPUS, num_microbatches=6, loss_reduction="sum", schedule=schedule, checkpoint="always"
    )
    loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert_close(left_behind(model, loss), left_behind(own, total))
    torch.testing.assert_close(model.level, own.level)


def test_outputs_that_are_inputs_or_share_memory() -> None:
    class Sharing(Blocks):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = super().forward(x)
            return {"x": x, "part": x[:, :4], "y": y, "left": y[:, :8], "right": y[:, 8:]}

    model, (x, _) = Sharing(), batch_of(8)
    x.requires_grad_()
    expected = model(x)
    (expected["left"].sum() + 2 * expected["right"].sum() + expected["part"].sum()).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    of_x = x.grad.clone()
    model.zero_grad()
    x.grad = None
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=4, loss_reduction="sum")
    found = compiled(x)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    (found["left"].sum() + 2 * found["right"].sum() + found["part"].sum()).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    torch.testing.assert_close(x.grad, of_x)


def test_stages_by_name_and_copies_for_the_optimizer() -> None:
    model, (x, y) = Blocks(), batch_of(8)
    own = copy.deepcopy(model).bfloat16()
    compiled = roundpipe_fx.compile(
        own, devices=CPUS, num_microbatches=2, stages=["layers.1", "layers.4"], optim_dtype=torch.float32
    )
    with roundpipe_fx.OptimizerCtx():
        optimizer = torch.optim.SGD(compiled.parameters(), 1e-3)
    losses = []
    for _ in range(3):
        losses.append(compiled.forward_backward(x.bfloat16(), labels=y.bfloat16(), loss_fn=squares).item())
        compiled.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    assert losses[2] < losses[0]
    assert [stage.modules.split(" … ")[0].split(".")[1] for stage in compiled.plan.stages] == ["0", "1", "4"]


def test_other_shapes_and_modes_recompile() -> None:
    model = Blocks(dropout=0.1)
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=2, loss_reduction="sum")
    for rows in (4, 8, 6):
        x, y = batch_of(rows)
        compiled.eval()
        torch.testing.assert_close(compiled(x), model(x))
        compiled.train()
        compiled.forward_backward(x, labels=y, loss_fn=squares)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.body:
            x = torch.relu(layer(x))
        return self.left(x).t(), self.right(x)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_strides_of_gradients_and_outputs_that_nobody_uses(compiler: str) -> None:
    model, x = Heads(), torch.randn(6, 8)
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(
        model,
        devices=CPUS,
        num_microbatches=3,
        loss_reduction="sum",
        dynamic=True,
        stage_compiler=compiler,
        merge_output=lambda outputs: (torch.cat([o[0] for o in outputs], 1), torch.cat([o[1] for o in outputs])),
    )
    for rows in (6, 9):
        x = torch.randn(rows, 8)
        for run, of in ((compiled, model), (own, own)):
            of.zero_grad()
            left, _ = run(x)
            (left.contiguous().square() * torch.arange(1.0, 5.0)[:, None]).sum().backward()
        for found, expected in zip(model.parameters(), own.parameters(), strict=True):
            if expected.grad is None:
                assert found.grad is None or not found.grad.any()
            else:
                torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5)


def test_roundpipes_names_of_arguments() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return self.layer(x) * scale

    class Labelled(Scaled):
        def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) - label).square().mean()

    x, y, loss_fn = torch.randn(4, 4), torch.randn(4, 4), nn.MSELoss()
    model = roundpipe_fx.compile(Scaled(), num_microbatches=2)
    expected = model.forward_backward(x, scale=2.0, labels=y, loss_fn=loss_fn)
    given = {"label": y, "loss_fn": loss_fn}
    assert torch.equal(model.forward_backward(input_args=(x,), input_kwargs={"scale": 2.0}, **given), expected)
    assert torch.equal(model.forward_backward(x, scale=2.0, **given), expected)
    for wrong, message in (
        ({"labels": y}, "both label and labels"),
        ({"input_args": (x,)}, "both positional arguments and input_args"),
        ({"scale": 1.0, "input_kwargs": {"scale": 2.0}}, "'scale' twice"),
        ({"run_config": None}, "no run_config: a plan is made for one setting"),
    ):
        with pytest.raises(TypeError, match=message):
            model.forward_backward(x, **given, **wrong)
    own = Labelled()
    loss = roundpipe_fx.compile(own, num_microbatches=2).forward_backward(x, label=y)
    assert torch.allclose(loss, own(x, y))
