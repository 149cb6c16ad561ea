"""Outputs that the backward reads: parts of microbatches are kept beside the output that is put together from them."""

from __future__ import annotations

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
