from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx import OptimizerCtx
from roundpipe_fx.runtime import optimizer_parameters


def make(optim_dtype: torch.dtype | None = torch.float32) -> roundpipe_fx.CompiledModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).bfloat16()
    return roundpipe_fx.compile(model, optim_dtype=optim_dtype)


def backward(model: nn.Module, seed: int = 0) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()
    model(x).float().square().mean().backward()


def reference(steps: int, lr: float = 1e-3) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Mixed-precision training written by hand: the model's parameters and the master copies."""
    model = make(None)._state_of_roundpipe_fx.original
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=lr)
    for step in range(steps):
        backward(model, step)
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
    return [p.detach() for p in model.parameters()], [m.detach() for m in masters]


def assert_equal(found: object, expected: list[torch.Tensor]) -> None:
    for left, right in zip(found, expected, strict=True):  # type: ignore[call-overload]
        assert left.dtype == right.dtype and torch.equal(left, right)


def train(model: roundpipe_fx.CompiledModule, steps: int, first: int = 0) -> torch.optim.Optimizer:
    with OptimizerCtx():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(first, first + steps):
        backward(model, step)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    return optimizer


def test_the_context_gives_the_optimizers_parameters() -> None:
    model = make()
    own = dict(model.named_parameters())
    with OptimizerCtx(), OptimizerCtx():
        copies = dict(model.named_parameters())
        assert [p for p in model.parameters()] == [*copies.values()]
        assert dict(model.named_parameters(prefix="m")).keys() == {f"m.{name}" for name in own}
        assert not list(model.named_parameters(recurse=False))
        assert all(
            p.dtype is torch.bfloat16 for p in model.get_submodule("0").parameters()
        )  # a submodule's are its own
        thread_sees: list[int] = []
        thread = threading.Thread(target=lambda: thread_sees.extend(map(id, model.parameters())))
        thread.start()
        thread.join()
    assert thread_sees == [id(p) for p in own.values()]
    assert copies.keys() == own.keys()
    for name, parameter in own.items():
        assert copies[name].dtype is torch.float32 and torch.equal(copies[name].bfloat16(), parameter)
        assert copies[name].is_leaf and copies[name].requires_grad
    assert [id(p) for p in model.parameters()] == [id(p) for p in own.values()]
    assert [id(p) for p in model.optim_parameters()] == [id(p) for p in copies.values()]
    with pytest.raises(KeyError), OptimizerCtx():
        raise KeyError
    assert next(model.parameters()).dtype is torch.bfloat16


def test_without_optim_dtype_they_are_the_models_own() -> None:
    model = make(None)
    with OptimizerCtx():
        assert [id(p) for p in model.parameters()] == [
            id(p) for p in model._state_of_roundpipe_fx.original.parameters()
        ]
    backward(model)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    before = model.get_parameter("0.weight").detach().clone()
    model.step(optimizer.step)
    assert not torch.equal(model.get_parameter("0.weight"), before) and model.get_parameter("0.weight").grad is not None
    model.synchronize()


def test_training_with_master_copies() -> None:
    model = make()
    train(model, 5)
    parameters, masters = reference(5)
    assert_equal(model.parameters(), parameters)
    assert_equal(model.optim_parameters(), masters)
    assert all(p.grad is None for p in model.parameters())


def test_gradients_add_up_until_they_are_cleared() -> None:
    model = make()
    list(model.optim_parameters())
    backward(model)
    expected = [2 * p.grad.float() for p in model.parameters()]
    seen: list[torch.Tensor] = []
    model.step(lambda: None)
    backward(model)
    model.step(lambda scale, to: to.extend(scale * p.grad for p in model.optim_parameters()), False, 1, to=seen)
    assert_equal(seen, expected)


def test_asynchronous_steps_are_one_step_behind() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    go = threading.Event()

    def step() -> None:
        go.wait(10)
        optimizer.step()
        optimizer.zero_grad()

    backward(model)
    model.step(step, is_async=True)
    assert_equal(model.parameters(), before)
    go.set()
    model.synchronize()
    assert_equal(model.parameters(), reference(1)[0])

    def broken() -> None:
        raise KeyError("broken")

    backward(model)
    model.step(broken, is_async=True)
    with pytest.raises(KeyError, match="broken"):
        model.synchronize()
    model.synchronize()  # it was told once


def test_an_optimizer_steps_and_clears_its_gradients() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=1e-3)
    for step in range(3):
        backward(model, step)
        model.step(optimizer, is_async=step == 1)
        model.synchronize()
    assert_equal(model.parameters(), reference(3)[0])
    assert all(p.grad is None for p in (*model.parameters(), *model.optim_parameters()))


def test_an_interrupt_while_waiting_for_an_asynchronous_step_leaves_it_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=1e-3)
    backward(model)
    go = threading.Event()
    model.step(lambda: (go.wait(10), optimizer.step()), is_async=True)
    with monkeypatch.context() as patch:

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(optimizer_parameters, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.synchronize()
    go.set()
    model.synchronize()
    assert_equal(model.parameters(), reference(1)[0])


def test_an_asynchronous_step_that_is_interrupted_keeps_its_gradients_for_the_next() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=1e-3)

    def interrupted() -> None:
        raise KeyboardInterrupt

    backward(model, 0)
    model.step(interrupted, is_async=True)
    with pytest.raises(KeyboardInterrupt):
        model.step(optimizer)
    model.step(optimizer)
    assert_equal(model.parameters(), reference(1)[0])


def test_state_dict_round_trips_keep_both() -> None:
    model = make()
    train(model, 3)
    parameters, masters = reference(3)
    plain = model._state_of_roundpipe_fx.original.state_dict()
    state = model.state_dict()
    assert list(state) == list(plain) and all(state[name].dtype is plain[name].dtype for name in state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    fresh = make()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_equal(fresh.parameters(), parameters)
    assert_equal(fresh.optim_parameters(), masters)
    trained = [p.detach().clone() for p in model.optim_parameters()]
    train(model, 2)
    model.load_state_dict(copy.deepcopy(fresh.state_dict()))
    assert_equal(model.optim_parameters(), trained)
    # A model without copies takes it, and without copies in it they are recreated.
    nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).load_state_dict(state)
    fresh.load_state_dict(dict(plain))
    assert_equal(fresh.optim_parameters(), [p.float() for p in plain.values()])


def test_copies_of_the_model_keep_both() -> None:
    model = make()
    train(model, 2)
    twin = copy.deepcopy(model)
    assert_equal(twin.optim_parameters(), [p.detach() for p in model.optim_parameters()])
    assert next(twin.optim_parameters()) is not next(model.optim_parameters())
    train(twin, 1)
    assert not torch.equal(next(twin.optim_parameters()), next(model.optim_parameters()))


def test_tied_and_frozen_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.frozen(self.two(self.one(x)))

    model = roundpipe_fx.compile(Tied().bfloat16(), optim_dtype=torch.float32)
    assert [name for name, _ in model.optim_named_parameters()] == ["one.weight", "one.bias", "two.bias"]
    every = dict(model.optim_named_parameters(remove_duplicate=False))
    assert every["two.weight"] is every["one.weight"] and "frozen.weight" not in every
    backward(model)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.5)
    model.step(optimizer.step)
    assert torch.equal(model.two.weight, every["one.weight"].bfloat16())


def test_misuse() -> None:
    with pytest.raises(TypeError, match=r"floating-point dtype like torch\.float32"):
        make(torch.int32)
    model = make()
    backward(model)
    with pytest.raises(RuntimeError, match=r"'0\.weight' has a gradient, but no optimizer was given its copy"):
        model.step(lambda: None)
