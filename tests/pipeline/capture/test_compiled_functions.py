"""Models that cannot be traced as one graph: the error says that a pipeline needs one, and what to do."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from tests.pipeline.steps import CPUS

NEEDED = "a pipeline needs the model in one graph"


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if random.random() < 0.9:
                x = layer(x)
        return x


class _Reading(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if y.sum().item() > 0 else y


class _Breaking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class _LockingFirst(nn.Linear):
    """Registers a hook in its first call, as models of Hugging Face do that return what their layers compute."""

    lock, is_hooked = threading.Lock(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_hooked:
            with self.lock:
                self.is_hooked = True
        return super().forward(x)


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_full_backward_hook(lambda module, given, gradients: None)
    return model


def _dispatched() -> nn.Module:
    hooks = pytest.importorskip("accelerate.hooks")
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    return model


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (_Dropping, "Python's random numbers"),
        (lambda: _Reading(4, 4), "reads a number from a tensor"),
        (lambda: _Breaking(4, 4), "what the text of this error names"),
        (_hooked, "backward hooks of '0'"),
        (lambda: _LockingFirst(4, 4), "a lock, under which the first call"),
        (_dispatched, "accelerate's hooks, as of 'the model', '0'"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_cause_is_named(make: Any, cause: str) -> None:
    model, x = make(), torch.randn(4, 4)
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=2)
    for call in (compiled, lambda x: compiled.forward_backward(x, loss_fn=torch.sum), compiled.trace):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=NEEDED) as raised:
            call(x)
        assert cause in str(raised.value)
        (note,) = raised.value.__notes__
        assert NEEDED in note and cause in note and "Otherwise compile without devices=" in note


def test_hooks_that_a_pipeline_runs() -> None:
    model, x, seen = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(4, 4), []
    model.register_full_backward_hook(lambda *_: seen.append("model"))
    model[0].weight.register_hook(lambda _: seen.append("parameter"))
    roundpipe_fx.compile(model, devices=CPUS, num_microbatches=2)(x).sum().backward()
    assert sorted(seen) == ["model", "parameter"]


def test_a_first_call_before_compilation_takes_the_lock() -> None:
    model, x = _LockingFirst(4, 4), torch.randn(4, 4)
    expected = model(x)
    torch.testing.assert_close(roundpipe_fx.compile(model, devices=CPUS, num_microbatches=2)(x), expected)


def test_jagged_tensors() -> None:
    model, parts = nn.Linear(4, 4), [torch.randn(2, 4), torch.randn(3, 4)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    compiled = roundpipe_fx.compile(model, num_microbatches=2)
    for call in (compiled, lambda x: compiled.forward_backward(x, loss_fn=lambda y: y.values().sum())):
        with pytest.raises(ValueError, match=r"jagged \(nested\) tensor cannot be split.*split_input"):
            call(x)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, torch.func.jacfwd])
def test_transforms_around_the_model(transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    compiled = roundpipe_fx.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), devices=CPUS)
    with pytest.raises(RuntimeError, match=rf"{NEEDED}.*: a transform of torch\.func"):
        transform(lambda x: compiled(x).sum())(torch.randn(2, 4))
