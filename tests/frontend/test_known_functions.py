"""Functions of other libraries that stand in graphs as one call: bits, sizes, and what is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.trace_rules import is_callable_allowed
from trl.kernels import ChunkedLogProbFunction, chunked_logprob

import roundpipe_fx
from roundpipe_fx import torch_private

_WORDS, _WIDTH, _TILE = 20, 8, 6


class _Head(nn.Module):
    """A projection to logits and TRL's loss, as its fused head calls it."""

    def __init__(self, bias: bool = False, softcap: float | None = None) -> None:
        super().__init__()
        self.before = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, _WORDS, bias=bias)
        self.softcap = softcap

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, weight, bias = self.before(x).relu(), self.head.weight, self.head.bias
        log_probs, entropy, _, _, is_top1 = ChunkedLogProbFunction.apply(
            hidden, weight, bias, targets, 0.9, _TILE, self.softcap, 1.1, ("entropy", "is_top1")
        )
        return -log_probs.mean(), entropy, is_top1


def _step(model: Any, own: nn.Module, rows: int) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    own.zero_grad()
    loss, entropy, is_top1 = model(torch.randn(rows, _WIDTH), torch.randint(_WORDS, (rows,)))
    loss.backward()
    gradients = [parameter.grad for parameter in own.parameters()]
    return [loss.detach(), entropy.detach(), is_top1, *(grad for grad in gradients if grad is not None)]


@pytest.mark.parametrize("budget", [None, 0.0])
@pytest.mark.parametrize(("bias", "softcap"), [(False, None), (True, 3.0)])
@pytest.mark.quick_every(4)
def test_the_loss_of_trl(budget: float | None, bias: bool, softcap: float | None) -> None:
    torch.manual_seed(0)
    own = _Head(bias, softcap)
    model = roundpipe_fx.compile(own, fullgraph=True, memory_budget=budget, tiling="never")
    for rows in (16, 16, 24):
        expected = _step(own, own, rows)
        found = _step(model, own, rows)
        assert len(found) == len(expected) == 3 + len([*own.parameters()])
        assert all(map(torch.equal, found, expected))


def test_other_compilations_are_left_alone() -> None:
    own = _Head()
    roundpipe_fx.compile(own, fullgraph=True)(torch.randn(4, _WIDTH), torch.randint(_WORDS, (4,)))
    assert not is_callable_allowed(ChunkedLogProbFunction)
    assert chunked_logprob._use_triton.__module__ == "trl.kernels.chunked_logprob"


def test_a_function_is_allowed_until_the_last_compilation_ends() -> None:
    with torch_private.allowed_in_graph(ChunkedLogProbFunction):
        roundpipe_fx.compile(_Head(), fullgraph=True)(torch.randn(4, _WIDTH), torch.randint(_WORDS, (4,)))
        assert is_callable_allowed(ChunkedLogProbFunction)
    assert not is_callable_allowed(ChunkedLogProbFunction)


def test_what_the_user_allows_stays_allowed() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    torch.compiler.allow_in_graph(function)
    with torch_private.allowed_in_graph(function):
        pass
    assert is_callable_allowed(function)
