"""The host's work in a step, which the device waits for: it depends on the program, not on the size of its graph."""

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx

_SEEN_BEFORE = 4
"""Steps in which plans may change."""


class _Scored(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        # One weight for all layers: each further one would be an input and a gradient of the step.
        self.layer, self.layers = nn.Linear(8, 8), layers

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(self.layers):
            x = torch.tanh(self.layer(x))
        return x.square().mean(), x


def _calls_in_a_step(layers: int, options: dict[str, Any]) -> Counter[str]:
    """Calls of functions of the package in one step, by function."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = roundpipe_fx.compile(_Scored(layers), stages=1, **options)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/roundpipe_fx/" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    for number in range(_SEEN_BEFORE + 1):
        x = torch.ones(4, 8)
        if number == _SEEN_BEFORE:
            sys.setprofile(count)
        try:
            loss, _ = compiled(x)  # the scores are dropped at the end of the step
            loss.backward()
        finally:
            sys.setprofile(None)
    return calls


@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.0}, {"memory_budget": 1 << 20}, {"outputs": "held"}])
@pytest.mark.quick_every(4)
def test_host_work_of_a_step_does_not_grow_with_its_graph(options: dict[str, Any]) -> None:
    few, many = (_calls_in_a_step(layers, options) for layers in (2, 40))
    assert sum(few.values()) > 5
    # A longer program may save another value, which is looked at once.
    assert {name: count for name, count in many.items() if count > few[name] + 1} == {}
