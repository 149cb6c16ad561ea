"""Outputs that the backward reads: parts of microbatches are kept beside the output that is put together from them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 96)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        logits = self.head(hidden)
        return logits.square().mean(), logits, hidden


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_plans_are_exact_where_the_caller_holds_outputs(microbatches: int) -> None:
    model = roundpipe_fx.compile(Beside(), num_microbatches=microbatches, devices=["cpu"], memory_budget=0.0)
    x = torch.randn(64, 48)
    for _ in range(2):
        model.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            outputs = model(x)
            outputs[0].backward()
    assert model.plan.peak_bytes - 64 <= peak.bytes <= model.plan.peak_bytes <= model.plan.budget  # scalars


class _Returning(nn.Module):
    """Returns a loss, and more that is made from a hidden value and the input."""

    def __init__(self, more: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.more = more

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.second(torch.tanh(self.first(x)))
        return torch.tanh(hidden).mean(), self.more(hidden, x, self.first.weight)


_MORE: dict[str, Callable[..., Any]] = {
    "expanded": lambda hidden, x, weight: hidden.unsqueeze(1).expand(-1, 6, -1),
    "view of an input": lambda hidden, x, weight: x.unsqueeze(1).expand(-1, 6, -1),
    "input": lambda hidden, x, weight: x,
    "view beside": lambda hidden, x, weight: (hidden, hidden.view(-1, 2, 4)),
    "views": lambda hidden, x, weight: (hidden.unsqueeze(1), hidden.view(-1, 2, 4)),
    "twice": lambda hidden, x, weight: (hidden, hidden),
    "view of a weight": lambda hidden, x, weight: (hidden, weight.t()),
    "dict": lambda hidden, x, weight: {"hidden": hidden},
}


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("more", _MORE)
def test_what_is_put_together_of_expanded_outputs_and_views_is_counted(more: str, differentiable: bool) -> None:
    """Parts that share memory are copied one by one."""
    model = roundpipe_fx.compile(_Returning(_MORE[more]), num_microbatches=2, stages=2, memory_budget=1.0)
    x = torch.randn(64, 8, requires_grad=differentiable)
    for _ in range(3):
        model.zero_grad()
        x.grad = None
        with roundpipe_fx.measure_peak("cpu") as peak, _without_collection():
            outputs = model(x)
            outputs[0].backward()
        del outputs
    assert model.plan.peak_bytes - 64 <= peak.bytes <= model.plan.peak_bytes  # scalars


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Meanwhile no garbage is collected, so values in cycles stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_what_is_returned_twice_is_one_tensor() -> None:
    model = roundpipe_fx.compile(_Returning(_MORE["twice"]), num_microbatches=2, stages=2)
    loss, (first, second) = model(torch.randn(64, 8))
    assert first is second
    (loss + first.sum()).backward()
