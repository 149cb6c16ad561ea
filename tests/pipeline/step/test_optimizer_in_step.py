"""An optimizer's step that is part of ``forward_backward``: the bits of the same step afterwards, updates beside the
backward, and what is left when something fails. tests/gpu/test_offloaded.py has it with devices."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.runtime import stage_updates
from tests.golden_models import GOLDEN
from tests.pipeline.steps import Blocks, step_batch

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _groups(parameters: list[nn.Parameter]) -> list[dict]:
    return [
        {"params": [p for p in parameters if p.ndim > 1], "lr": 0.02, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "lr": 0.01},
    ]


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda parameters: torch.optim.AdamW(_groups(parameters)),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(_groups(parameters), foreach=True, amsgrad=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(_groups(parameters), fused=True),
    "Adam fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(_groups(parameters), momentum=0.9, nesterov=True),
    "SGD fused": lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.1), fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(_groups(parameters), initial_accumulator_value=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(_groups(parameters), centered=True),
}


def _assert_trained_alike(
    models: tuple[nn.Module, nn.Module], optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer]
) -> None:
    one, other = (optimizer.state_dict() for optimizer in optimizers)
    assert one["param_groups"] == other["param_groups"] and one["state"].keys() == other["state"].keys()
    for number, state in one["state"].items():
        assert state.keys() == other["state"][number].keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other["state"][number][name])), name
    for (name, left), (_, right) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        assert torch.equal(left, right), name


def _trained_in_and_after(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    make: Make = OPTIMIZERS["AdamW"],
    synchronize: bool = True,
    steps: int = 3,
    optim_dtype: torch.dtype | None = None,
    **options,
) -> tuple[roundpipe_fx.CompiledModule, torch.optim.Optimizer]:
    """Train with the optimizer within the step and after it, and compare everything."""
    models, optimizers, losses = [], [], []
    for within in (True, False):
        own = copy.deepcopy(model)
        compiled = roundpipe_fx.compile(own, optim_dtype=optim_dtype, **{"devices": ["cpu"], **options})
        optimizer = make([*compiled.optim_parameters()])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        torch.manual_seed(0)
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for _ in range(steps):
                if within:
                    found.append(compiled.forward_backward(**batch, optimizer=optimizer, synchronize=synchronize))
                else:
                    found.append(compiled.forward_backward(**batch))
                    compiled.step(optimizer)
                scheduler.step()
        compiled.synchronize()
        assert all(parameter.grad is None for parameter in (*own.parameters(), *compiled.optim_parameters()))
        models.append(compiled)
        optimizers.append(optimizer)
        losses.append(torch.stack(found))
    assert torch.equal(*losses)
    _assert_trained_alike((models[0], models[1]), (optimizers[0], optimizers[1]))
    for left, right in zip(models[0].optim_parameters(), models[1].optim_parameters(), strict=True):
        assert torch.equal(left, right)
    return models[0], optimizers[0]


def _updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """For each update that is made, the number of its parameters and whether the step's backward still ran."""
    seen: list[tuple[int, bool]] = []
    submit = stage_updates.StepUpdates.submit

    def submitted(self: stage_updates.StepUpdates, gradients: dict, waits: object = ()) -> None:
        if gradients:
            seen.append((len(gradients), threading.current_thread() is not threading.main_thread()))
        submit(self, gradients, waits)

    monkeypatch.setattr(stage_updates.StepUpdates, "submit", submitted)
    return seen


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.quick_every(3)
def test_every_optimizer_has_the_bits_of_its_step_after_the_backward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _updates(monkeypatch)
    _trained_in_and_after(Blocks(depth=3), step_batch(), OPTIMIZERS[name], steps=2, num_microbatches=2, stages=3)
    assert sum(early for _, early in seen) == 2 * 3


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("synchronize", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.quick_every(3)
def test_offloaded_models_masters_and_steps_that_do_not_wait(
    dtype: torch.dtype | None, synchronize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _updates(monkeypatch)
    batch, model = step_batch(), Blocks(dropout=0.1)
    if dtype is not None:
        model, batch = model.bfloat16(), {**batch, "x": batch["x"].bfloat16()}
    _trained_in_and_after(model, batch, synchronize=synchronize, optim_dtype=dtype, num_microbatches=2, stages=3)
    assert sum(early for _, early in seen) > 3


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "roundpipe"])
@pytest.mark.quick_every(3)
def test_tied_weights_are_updated_after_their_last_gradient_and_last_reader(schedule: str) -> None:
    make, make_batch, _ = GOLDEN["tied_transformer"]
    torch.manual_seed(0)
    batch = {key: torch.cat([value] * 2) for key, value in make_batch().items()}
    model, _ = _trained_in_and_after(
        make(), batch, devices=["cpu", "cpu"], num_microbatches=2, schedule=schedule, synchronize=False
    )
    with pytest.raises(RuntimeError, match="requires grad"):
        next(model.parameters()).add_(1)


class Unusual(nn.Module):
    """Parameters that cannot be updated before the backward ends, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.watched, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.returned, self.unused = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))
        self.flat = nn.Parameter(torch.ones(32))
        self.part = nn.Parameter(self.flat.data[16:])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = self.watched(torch.tanh(self.frozen(x))) * self.returned + self.flat[:16] * self.part
        return self.last(scaled.tanh()).square().sum(), self.returned.view(4, 4)


def test_parameters_that_are_frozen_watched_returned_shared_or_unused() -> None:
    model = Unusual()
    x = torch.randn(8, 16)
    seen: list[torch.Tensor] = []
    trained = []
    for within in (True, False):
        own = copy.deepcopy(model)
        own.part.data = own.flat.data[16:]
        own.watched.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
        own.unused.grad, own.last.bias.grad = torch.ones(16), torch.ones(16)  # added to, or applied alone
        compiled = roundpipe_fx.compile(own, devices=["cpu"], num_microbatches=1, loss_reduction="sum", stages=2)
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.1)
        if within:
            _, (_, returned) = compiled.forward_backward(x, optimizer=optimizer, return_outputs=True)
        else:
            compiled.forward_backward(x)
            optimizer.step()
            optimizer.zero_grad()
        trained.append((own, optimizer))
    assert len(seen) == 2 and torch.equal(*seen)
    assert returned.shape == (4, 4)
    assert torch.equal(trained[0][0].frozen.weight, model.frozen.weight)
    _assert_trained_alike(*zip(*trained, strict=True))


def test_parameters_that_no_optimizer_has_keep_their_gradients() -> None:
    model, batch = Blocks(depth=2), step_batch()
    compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=1)
    compiled.forward_backward(**batch, optimizer=torch.optim.SGD(model.layers[0].parameters(), 0.1))
    assert all(p.grad is None for p in model.layers[0].parameters())
    assert all(p.grad is not None for p in model.layers[1].parameters())


class OneStepForAll(torch.optim.SGD):
    """Its step depends on all gradients."""

    def step(self, closure: None = None) -> None:
        parameters = self.param_groups[0]["params"]
        nn.utils.clip_grad_norm_(parameters, 0.01)
        super().step()


@pytest.mark.parametrize("watched", [False, True])
def test_optimizers_that_need_all_gradients_step_after_the_backward(
    watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _updates(monkeypatch)
    steps: list[object] = []

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if not watched:
            return OneStepForAll(parameters, 0.1)
        made = torch.optim.SGD(parameters, 0.1)
        made.register_step_pre_hook(lambda *_: steps.append(nn.utils.clip_grad_norm_(parameters, 0.01)))
        return made

    _trained_in_and_after(Blocks(depth=2), step_batch(), make, steps=2, num_microbatches=2)
    assert not seen and len(steps) == (4 if watched else 0)


def test_misuse() -> None:
    model, batch = Blocks(depth=2), step_batch()
    compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=1)
    with pytest.raises(TypeError, match="LBFGS steps with a closure that computes the loss several times"):
        compiled.forward_backward(**batch, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, not list"):
        compiled.forward_backward(**batch, optimizer=[])
    copies = roundpipe_fx.compile(copy.deepcopy(model), devices=["cpu"], num_microbatches=1, optim_dtype=torch.float64)
    with pytest.raises(RuntimeError, match="is the optimizer's, but no optimizer was given its copy"):
        copies.forward_backward(**batch, optimizer=torch.optim.SGD(copies.parameters(), 0.1))
    assert all(parameter.grad is None for parameter in (*model.parameters(), *copies.parameters()))


class _Fails:
    """Makes the n-th update fail, after it has computed states. Steps outside the thread of updates are of samples of
    the optimizer, whose state is measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
        self.count, step = 0, torch.optim.AdamW.step

        def failing(optimizer: torch.optim.AdamW, closure: None = None) -> None:
            is_update = threading.current_thread().name.startswith("roundpipe_fx optimizer")
            self.count += is_update
            if is_update and self.count == at:
                for parameter in optimizer.param_groups[0]["params"]:
                    optimizer.state[parameter]["step"] = torch.tensor(0.0)
                raise error
            step(optimizer)

        monkeypatch.setattr(torch.optim.AdamW, "step", failing)


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("synchronize", [True, False])
@pytest.mark.parametrize("error", [MemoryError("no room for the state"), KeyboardInterrupt()])
def test_an_update_that_fails_leaves_the_gradients_that_were_not_applied(
    error: BaseException, synchronize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, model = step_batch(), Blocks(depth=4)
    reference = copy.deepcopy(model)
    options = {"devices": ["cpu"], "num_microbatches": 2, "stages": 4}
    compiled = roundpipe_fx.compile(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    after = roundpipe_fx.compile(reference, **options)
    expected = torch.optim.AdamW(reference.parameters())
    for _ in range(2):
        after.forward_backward(**batch)
        after.step(expected)
    compiled.trace(**batch, optimizer=optimizer)
    with monkeypatch.context() as patch:
        _Fails(patch, 2, error)
        with pytest.raises(type(error)) as raised:
            compiled.forward_backward(**batch, optimizer=optimizer, synchronize=synchronize)
            compiled.synchronize()
        assert raised.value is error
    without = [parameter.grad is None for parameter in model.parameters()]
    assert any(without) and not all(without)
    assert len(optimizer.state) == sum(without)
    optimizer.step()  # for those that have a gradient
    optimizer.zero_grad()
    compiled.synchronize()  # it was told once
    compiled.forward_backward(**batch, optimizer=optimizer)
    _assert_trained_alike((model, reference), (optimizer, expected))


@pytest.mark.usefixtures("on_the_host")
def test_a_step_tells_of_the_update_before_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model = step_batch(), Blocks(depth=4)
    compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=2, stages=4)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled.trace(**batch, optimizer=optimizer)
    _Fails(monkeypatch, 2, MemoryError("no room for the state"))
    with pytest.raises(MemoryError, match="no room for the state"):
        for _ in range(2):
            compiled.forward_backward(**batch, optimizer=optimizer, synchronize=False)
    assert any(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    compiled.forward_backward(**batch, optimizer=optimizer)


@torch.library.custom_op("roundpipe_fx_tests::fails_backward", mutates_args=())
def fails_backward(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("roundpipe_fx_tests::failing", mutates_args=())
def failing(x: torch.Tensor) -> torch.Tensor:
    if _failures:
        raise _failures.pop()
    return x.clone()


fails_backward.register_fake(torch.empty_like)
failing.register_fake(torch.empty_like)
fails_backward.register_autograd(lambda ctx, gradient: failing(gradient))
_failures: list[BaseException] = []


class FailingFirst(nn.Module):
    """The backward of its first layer, which is the last one, fails when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(16, 16), Blocks(depth=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(fails_backward(self.first(x)))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), ValueError("wrong")])
def test_a_backward_that_fails_says_what_was_updated_and_is_not_repeated(error: BaseException) -> None:
    batch, model = step_batch(), FailingFirst()
    compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=1, memory_budget=1.0, stages=4)
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    _failures.append(error)
    with pytest.raises(type(error)) as raised:
        compiled.forward_backward(**batch, optimizer=optimizer)
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed and not any(name.startswith("first") for name in changed)
    (note,) = raised.value.__notes__
    assert f"had already updated {len(changed)} parameters" in note
    assert all(parameter.grad is None for parameter in model.parameters())
    compiled.forward_backward(**batch, optimizer=optimizer)
    assert not torch.equal(model.first.weight, before["first.weight"])


def test_updates_begin_beside_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model = step_batch(), FailingFirst()
    compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=1, stages=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    updated, step = threading.Event(), torch.optim.SGD.step

    def stepping(self: torch.optim.SGD, closure: None = None) -> None:
        step(self)
        updated.set()

    asked: list[bool] = []

    class Asked(list):
        def __bool__(self) -> bool:
            """Whether the backward of the first layer is to fail."""
            asked.append(updated.wait(10))
            return False

    compiled.trace(**batch, optimizer=optimizer)
    monkeypatch.setattr(torch.optim.SGD, "step", stepping)
    monkeypatch.setitem(globals(), "_failures", Asked())
    compiled.forward_backward(**batch, optimizer=optimizer)
    assert asked == [True]


def test_the_next_step_waits_for_its_own_stage_only(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model = step_batch(), Blocks(depth=4)
    compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=1, stages=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    begun, returned, second_action = threading.Event(), threading.Event(), threading.Event()
    step, wait_for = torch.optim.SGD.step, stage_updates.StageUpdates.wait_for
    first, reads = model.layers[0][0].weight, []

    def stepping(self: torch.optim.SGD, closure: None = None) -> None:
        if not returned.is_set():
            begun.set()
            assert returned.wait(10)
        elif all(shadow.data_ptr() != first.data_ptr() for shadow in self.param_groups[0]["params"]):
            assert second_action.wait(10)
        step(self)

    def waiting(self: stage_updates.StageUpdates, keys: object) -> None:
        keys = [*keys]
        if returned.is_set() and keys:
            reads.append(keys)
            if len(reads) == 2:
                second_action.set()
        wait_for(self, keys)

    compiled.trace(**batch, optimizer=optimizer)
    monkeypatch.setattr(torch.optim.SGD, "step", stepping)
    monkeypatch.setattr(stage_updates.StageUpdates, "wait_for", waiting)
    compiled.forward_backward(**batch, optimizer=optimizer, synchronize=False)
    assert begun.wait(10)
    returned.set()
    compiled.forward_backward(**batch)
    assert id(first) in reads[0] and id(first) not in reads[1]


def test_an_interrupt_while_updates_run_after_the_backward_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model = step_batch(), Blocks(depth=4)
    reference = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=1, stages=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    expected = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    after = roundpipe_fx.compile(reference, devices=["cpu"], num_microbatches=1, stages=4)
    after.forward_backward(**batch)
    after.step(expected)
    finish, finished, step = stage_updates.StepUpdates.finish, threading.Event(), torch.optim.SGD.step

    def finishing(self: stage_updates.StepUpdates, others: dict) -> None:
        finish(self, others)
        finished.set()
        raise KeyboardInterrupt

    def stepping(self: torch.optim.SGD, closure: None = None) -> None:
        finished.wait(10)
        step(self)

    compiled.trace(**batch, optimizer=optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(stage_updates.StepUpdates, "finish", finishing)
        patch.setattr(torch.optim.SGD, "step", stepping)
        with pytest.raises(KeyboardInterrupt):
            compiled.forward_backward(**batch, optimizer=optimizer)
    assert any(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    _assert_trained_alike((model, reference), (optimizer, expected))
