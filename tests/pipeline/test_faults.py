"""Faults and bad input: what reaches the user, and that the next step works."""

from __future__ import annotations

import copy
import gc
import logging
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import roundpipe_fx
from tests.comparison import assert_bitwise
from tests.long import long_but
from tests.pipeline.steps import CPUS, SCHEDULES, Blocks, assert_close, batch_of, left_behind, pipelined_step, squares

_broken: dict[str, Any] = {"phase": None, "stage": None, "pause": 0.0}
_pausing = threading.Event()


@torch.library.custom_op("roundpipe_fx_tests::fragile", mutates_args=())
def fragile(x: torch.Tensor, stage: int) -> torch.Tensor:
    _maybe_break("forward", stage)
    return x.clone()


@fragile.register_fake
def _(x: torch.Tensor, stage: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("roundpipe_fx_tests::fragile_backward", mutates_args=())
def fragile_backward(gradient: torch.Tensor, stage: int) -> torch.Tensor:
    _maybe_break("backward", stage)
    return gradient.clone()


@fragile_backward.register_fake
def _(gradient: torch.Tensor, stage: int) -> torch.Tensor:
    return torch.empty_like(gradient)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.stage = inputs[1]


fragile.register_autograd(lambda ctx, g: (fragile_backward(g, ctx.stage), None), setup_context=_setup)


class Broken(RuntimeError):
    pass


def _maybe_break(phase: str, stage: int) -> None:
    if _broken["stage"] != stage:
        return
    if _broken["pause"]:
        _pausing.set()
        time.sleep(_broken["pause"])
    recomputes = any(
        "instruction" in frame.f_locals and frame.f_locals["instruction"].action.kind == "R"
        for frame, _ in traceback.walk_stack(None)
    )
    if _broken["phase"] == ("recompute" if recomputes else phase):
        _broken["raised"] = time.perf_counter()
        raise Broken(f"{_broken['phase']} of stage {stage}")


class Fragile(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage, layer in enumerate(self.layers):
            x = x + layer(fragile(x, stage))
        return x


@pytest.fixture(autouse=True)
def _mended():
    yield
    _broken.update(phase=None, stage=None, pause=0.0)


@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("through_autograd", [False, True])
@pytest.mark.quick_every(2)
def test_what_a_stage_raises_reaches_the_caller(phase: str, stage: int, through_autograd: bool) -> None:
    model, (x, y) = Fragile(depth=4), batch_of(8)
    x.requires_grad_()
    compiled = roundpipe_fx.compile(
        model, devices=CPUS, stages=4, num_microbatches=4, loss_reduction="sum", checkpoint="always"
    )

    def step() -> torch.Tensor:
        if not through_autograd:
            return compiled.forward_backward(x, labels=y, loss_fn=squares)
        loss = squares(compiled(x), y)
        loss.backward()
        return loss.detach()

    expected = step()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    x.grad = None
    _broken.update(phase=phase, stage=stage)
    with pytest.raises(Broken, match=f"{phase} of stage {stage}") as caught:
        step()
    assert time.perf_counter() - _broken["raised"] < 1.0  # all workers have stopped
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert any(frame.name == "_maybe_break" for frame in frames)
    assert x.grad is None and all(parameter.grad is None for parameter in model.parameters())
    _broken.update(phase=None, stage=None)
    torch.testing.assert_close(step(), expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_other_workers_stop_within_a_second() -> None:
    model, (x, y) = Fragile(depth=4), batch_of(16)
    compiled = roundpipe_fx.compile(model, devices=CPUS, stages=4, num_microbatches=16)
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    _broken.update(phase="forward", stage=3)
    with pytest.raises(Broken):
        compiled.forward_backward(x, labels=y, loss_fn=squares)
    # The caller returns only when all have stopped; a new step runs at once.
    _broken.update(phase=None, stage=None)
    began = time.perf_counter()
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert time.perf_counter() - began < 1.0


def test_a_keyboard_interrupt_stops_the_step(request: pytest.FixtureRequest) -> None:
    model, (x, y) = Fragile(depth=4), batch_of(8)
    compiled = roundpipe_fx.compile(model, devices=CPUS, stages=4, num_microbatches=8, loss_reduction="sum")
    expected = compiled.forward_backward(x, labels=y, loss_fn=squares)
    model.zero_grad()
    _broken.update(stage=0, phase="nothing", pause=0.2)
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    interrupted: list[float] = []

    def interrupt() -> None:
        _pausing.wait()  # until a worker runs, so that the caller waits for it
        time.sleep(0.1)
        interrupted.append(time.perf_counter())
        signal.pthread_kill(main, signal.SIGINT)

    _pausing.clear()
    user = threading.Thread(target=interrupt, daemon=True)
    user.start()
    with pytest.raises(KeyboardInterrupt):
        compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert time.perf_counter() - interrupted[0] < 1.0
    user.join()
    assert all(parameter.grad is None for parameter in model.parameters())
    _broken.update(stage=None, pause=0.0)
    assert torch.equal(compiled.forward_backward(x, labels=y, loss_fn=squares), expected)


def test_a_small_batch_is_split_into_fewer_microbatches() -> None:
    model, (x, y) = Blocks(), batch_of(3)
    expected = squares(model(x), y).detach()
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=8, loss_reduction="sum")
    with pytest.warns(UserWarning, match="a batch of 3 cannot be split into 8 microbatches; using 3"):
        loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
    torch.testing.assert_close(loss, expected)


def test_batch_sizes_that_differ() -> None:
    class Sum(Blocks):
        def forward(self, x: torch.Tensor, bias: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
            return super().forward(x) * scale + bias

    compiled = roundpipe_fx.compile(Sum(), devices=CPUS, num_microbatches=2)
    with pytest.raises(ValueError, match=r"batch sizes differ: args\[0\] has 8, bias has 6.*split_input"):
        compiled(torch.randn(8, 16), bias=torch.randn(6, 16), scale=torch.randn(6, 16))
    with pytest.raises(ValueError, match=r"batch sizes differ: args\[0\] has 8, labels has 4"):
        compiled.forward_backward(
            torch.randn(8, 16), bias=torch.randn(8, 16), labels=torch.randn(4, 16), loss_fn=squares
        )


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda output, target: (output - target).square().sum(1), r"loss of shape \(2,\); it must be a single number"),
        (lambda output, target: (output - target).detach().sum(), "no loss that can be differentiated"),
        (lambda output, target: 3.0, "no loss that can be differentiated"),
        (lambda output, target: (output.sum(), (output - target).sum()), r"2 tensors .* return their \(weighted\) sum"),
    ],
)
def test_a_loss_that_is_none(loss_fn: Any, message: str) -> None:
    x, y = batch_of(8)
    compiled = roundpipe_fx.compile(Blocks(), devices=CPUS, num_microbatches=4)
    with pytest.raises(ValueError, match=message):
        compiled.forward_backward(x, labels=y, loss_fn=loss_fn)
    compiled.forward_backward(x, labels=y, loss_fn=squares)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ["cuda:99"]}, "'cuda:99' does not exist"),
        ({"devices": ["cpu:3"]}, "'cpu:3' does not exist"),
        ({"devices": ["tpu"]}, "'tpu' is not a device"),
        ({"devices": ["meta"]}, "'meta' is not supported"),
        ({"devices": []}, "at least one device"),
        ({"devices": CPUS, "stages": 1}, "stages=1 are fewer than the 2 devices"),
        ({"devices": CPUS, "stages": 4, "schedule": "roundpipe"}, "cuts forward and backward itself"),
        ({"devices": CPUS, "num_microbatches": 0}, "there must be at least one"),
        ({"devices": CPUS, "schedule": "2f2b"}, "schedule='2f2b': valid values are 'gpipe', '1f1b'"),
        ({"devices": CPUS, "checkpoint": "sometimes"}, "checkpoint='sometimes': valid values"),
        ({"devices": CPUS, "checkpoint": "always", "recompute": "full"}, "Give one of them"),
        ({"split_input": 1}, "give num_microbatches"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        roundpipe_fx.compile(Blocks(), **options)


def test_options_of_a_wrong_type() -> None:
    with pytest.raises(TypeError, match="give a list"):
        roundpipe_fx.compile(Blocks(), devices="cpu")
    with pytest.raises(TypeError, match="num_microbatches must be a positive int"):
        roundpipe_fx.compile(Blocks(), num_microbatches=2.0)
    with pytest.raises(TypeError, match="schedule must be a name"):
        roundpipe_fx.compile(Blocks(), schedule=3)


def test_a_given_schedule() -> None:
    model, (x, y) = Blocks(), batch_of(8)
    given = roundpipe_fx.Schedule.parse("0: F0.0 F0.1 B0.0 B0.1\n1: F1.0 B1.0 F1.1 B1.1")
    options: dict[str, Any] = {"labels": y, "loss_fn": squares, "num_microbatches": 2}
    step, compiled = pipelined_step(model, {"x": x}, schedule=given, **options)
    reference, _ = pipelined_step(model, {"x": x}, schedule="gpipe", **options)
    assert_bitwise(step, reference)
    assert compiled.plan.pipeline is not None and compiled.plan.pipeline.schedule == "given"
    split = roundpipe_fx.Schedule.parse("0: F0.0 F0.1 I0.0 W0.0 I0.1 W0.1\n1: F1.0 I1.0 F1.1 I1.1 W1.0 W1.1")
    step, _ = pipelined_step(model, {"x": x}, schedule=split, **options)
    assert_bitwise(step, reference)


def test_a_given_schedule_that_is_invalid() -> None:
    x, y = batch_of(8)
    given = roundpipe_fx.Schedule.parse("0: F0.0 F0.1 B0.0 B0.1\n1: F1.0 B1.0 B1.1 F1.1")
    compiled = roundpipe_fx.compile(Blocks(), devices=CPUS, num_microbatches=2, schedule=given)
    with pytest.raises(roundpipe_fx.InvalidScheduleError, match=r"device 0 waits at B0\.1 for B1\.1"):
        compiled.forward_backward(x, labels=y, loss_fn=squares)


def test_forward_backward_without_autograd_or_microbatches() -> None:
    x, y = batch_of(8)
    compiled = roundpipe_fx.compile(Blocks(), devices=CPUS, num_microbatches=2)
    with torch.no_grad(), pytest.raises(RuntimeError, match="autograd is off"):
        compiled.forward_backward(x, labels=y, loss_fn=squares)
    with pytest.raises(RuntimeError, match="compiled for microbatches"):
        roundpipe_fx.compile(Blocks()).forward_backward(x, labels=y, loss_fn=squares)
    with pytest.raises(ValueError, match="nothing to split"):
        compiled(3)


def test_a_graph_break_is_an_error() -> None:
    class Breaking(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return x.sin()

    compiled = roundpipe_fx.compile(Breaking(), devices=CPUS, num_microbatches=2)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(torch.randn(4, 16))


def test_the_backward_runs_once_and_sees_what_the_forward_saw() -> None:
    model, (x, y) = Blocks(), batch_of(8)
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=2)
    loss = squares(compiled(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has run already"):
        loss.backward()
    loss = squares(compiled(x), y)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@pytest.mark.long
def test_two_models_interleaved() -> None:
    first, second, (x, y) = Blocks(), Blocks(depth=3), batch_of(8)
    expected = []
    for model in (first, second):
        own = copy.deepcopy(model)
        loss = squares(own(x), y)
        loss.backward()
        expected.append(left_behind(own, loss))
    a = roundpipe_fx.compile(first, devices=CPUS, num_microbatches=4, loss_reduction="sum")
    b = roundpipe_fx.compile(second, devices=CPUS, num_microbatches=2, loss_reduction="sum", schedule="zero_bubble")
    loss_a, loss_b = squares(a(x), y), squares(b(x), y)
    loss_a.backward()
    loss_b.backward()
    assert_close(left_behind(first, loss_a), expected[0])
    assert_close(left_behind(second, loss_b), expected[1])


@pytest.mark.parametrize("schedule", long_but(SCHEDULES, quick={"1f1b"}))
def test_one_model_from_two_threads(schedule: str) -> None:
    model, (x, y) = Blocks(), batch_of(8)
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=4, loss_reduction="sum", schedule=schedule)
    expected = compiled.forward_backward(x, labels=y, loss_fn=squares)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    losses, errors = [], []

    def train() -> None:
        try:
            for _ in range(5):
                losses.append(compiled.forward_backward(x, labels=y, loss_fn=squares))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(loss, expected) for loss in losses) and len(losses) == 10
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 10 * gradient)


@pytest.fixture
def _unlogged() -> Iterator[None]:
    """Records with a traceback, which torch 2.11 logs when it compiles, would hold the frames of the step."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_unlogged")
@pytest.mark.long
def test_workers_end_with_their_model_and_nothing_leaks() -> None:
    def workers() -> int:
        return sum(thread.name.startswith("roundpipe_fx") for thread in threading.enumerate())

    gc.collect()
    before = workers()
    model, (x, y) = Blocks(depth=2), batch_of(4)
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=2, checkpoint="always")

    def step(compiled: roundpipe_fx.CompiledModule) -> None:
        compiled.forward_backward(x, labels=y, loss_fn=squares)
        squares(compiled(x), y).backward()

    for _ in range(3):
        step(compiled)
    assert workers() == before + 2

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())

    count = tensors()
    for _ in range(100):
        step(compiled)
    assert workers() == before + 2
    assert tensors() <= count
    del compiled, model
    gc.collect()
    deadline = time.perf_counter() + 5
    while workers() > before and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert workers() == before


def test_the_number_of_threads_stays_the_callers() -> None:
    threads = torch.get_num_threads()
    x, y = batch_of(4)
    compiled = roundpipe_fx.compile(Blocks(depth=2), devices=CPUS, num_microbatches=2)
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert torch.get_num_threads() == threads
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [threads]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_cannot_be_differentiated_twice(microbatches: int) -> None:
    compiled = roundpipe_fx.compile(Blocks(depth=2), devices=CPUS, num_microbatches=microbatches)
    x, other = torch.randn(4, 16, requires_grad=True), torch.ones(1, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice \(create_graph=True\)"):
        (other.sum() + gradient.square().sum()).backward()
    compiled(x).sum().backward(create_graph=True)
    penalty = sum(parameter.grad.square().sum() for parameter in compiled.parameters())
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        penalty.backward()


class Refusal(Exception):
    def __init__(self, wanted: int, found: int) -> None:
        super().__init__(f"{wanted} columns, please, not {found}")
        self.wanted = wanted


class _Refusing(torch.nn.Module):
    """Raises in a submodule, after it has written to a buffer and an attribute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seen = how, 0
        self.linear, self.latest = torch.nn.Linear(2, 2), None
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        y = self.linear(x[:, :2])
        self.latest = y.detach()
        if self.how == "assert":
            assert x.shape[-1] == 2, "two columns, please"
        elif x.shape[-1] != 2 and self.how == "raise":
            raise Refusal(2, x.shape[-1])
        elif x.shape[-1] != 2:
            return {}["missing"]
        return y


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("raise", Refusal, "2 columns, please, not 3"),
        ("assert", AssertionError, "two columns, please"),
        ("missing", KeyError, "'missing'"),
    ],
)
def test_exceptions_of_the_users_reach_him_as_they_are(how: str, error: type[Exception], text: str) -> None:
    model = torch.nn.Sequential(_Refusing(how))
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=2)
    calls = (
        lambda x: compiled(x),
        lambda x: compiled.forward_backward(x, loss_fn=torch.sum),
        lambda x: roundpipe_fx.compile(model, fullgraph=True)(x),
        lambda x: roundpipe_fx.plan(model, x, device="cpu"),
    )
    for call in calls:
        with pytest.raises(error) as raised:
            call(torch.randn(4, 3))
        assert str(raised.value).splitlines()[0] == text  # pytest explains assertions
        assert raised.value.__cause__ is None
        assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "forward"
    assert model[0].count == 0
    assert model[0].latest is None
    compiled.forward_backward(torch.randn(4, 2), loss_fn=torch.sum)
    assert model[0].count == 2


def test_exceptions_of_a_loss_function_too() -> None:
    def refuse(output: torch.Tensor) -> torch.Tensor:
        raise Refusal(1, output.shape[-1])

    compiled = roundpipe_fx.compile(Blocks(depth=1), num_microbatches=2)
    with pytest.raises(Refusal, match="1 columns"):
        compiled.forward_backward(batch_of()[0], loss_fn=refuse)


def test_what_cannot_be_traced_is_still_dynamos_error() -> None:
    class Branching(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(torch._dynamo.exc.Unsupported, match="Data-dependent branching"):
        roundpipe_fx.compile(Branching(), num_microbatches=2)(torch.randn(4, 4))


def test_a_model_that_computes_nothing() -> None:
    class Swap(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return y, x

    x, y = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2)
    first, second = roundpipe_fx.compile(Swap(), devices=CPUS, num_microbatches=2)(x, y)
    assert torch.equal(first, y)
    assert torch.equal(second, x)
    (2 * second).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 2), 2.0))
