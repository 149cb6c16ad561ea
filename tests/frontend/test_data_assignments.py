from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from tests.comparison import train_step


class Assigning(nn.Module):
    """Assigns new data to a buffer, twice, and to a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data = self.mean.data * 0.9 + 0.1 * x.mean(0)
        hidden = self.layer(x) * self.mean
        self.scale.data = self.scale.data.clamp(max=0.5)
        self.mean.data = self.mean.data * 0.9 + 0.1 * hidden.detach().mean(0)
        return (self.layer(hidden.sin() * self.scale) * self.mean).square().sum()


class Shared(Assigning):
    """Lets a buffer have the memory of an input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data = x[0]
        return (self.layer(x) * self.mean).sum()


@pytest.mark.parametrize(
    "options",
    [{}, {"memory_budget": 0.0}, {"stages": 2, "devices": ["cpu", "cpu"], "num_microbatches": 1}],
)
def test_new_data_of_buffers_and_parameters(options: dict[str, Any]) -> None:
    eager = Assigning().double()
    model = copy.deepcopy(eager)
    compiled = roundpipe_fx.compile(model, **options)
    memory = model.mean.data_ptr()
    for seed in range(3):
        x = torch.linspace(-seed, 1, 12, dtype=torch.float64).view(3, 4)
        expected, found = train_step(eager, eager, {"x": x}), train_step(compiled, model, {"x": x})
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-12, atol=1e-14)
    assert model.mean.data_ptr() == memory


class Other(Assigning):
    """Gives a buffer another shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data = self.layer(x).detach().mean(0, keepdim=True)
        return (self.layer(x) * self.mean).sum()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Shared, "whose memory something else reads or writes"),
        (Other, r"of another shape, dtype or device: float32\[1, 4\] on cpu, where it has float32\[4\] on cpu"),
    ],
)
@pytest.mark.parametrize("piped", [False, True])
def test_memory_of_another_tensor_is_never_copied(model: type[Assigning], why: str, piped: bool) -> None:
    options: dict[str, Any] = {"stages": 2, "devices": ["cpu", "cpu"], "num_microbatches": 1} if piped else {}
    with pytest.raises(ValueError, match=rf"assigns data to a buffer or a parameter {why}") as refused:
        roundpipe_fx.compile(model(), **options)(torch.ones(3, 4))
    assert "self.mean.data = " in str(refused.value)


class Advised(Assigning):
    """Does what the error says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data = x[0].clone()
        hidden = self.layer(x) + self.mean  # which no gradient reads
        self.mean.copy_(x[1])
        hidden = (hidden * self.mean).sin()
        self.mean = x[2]
        return (hidden * self.mean).sum()


@pytest.mark.parametrize("budget", [0.0, 1.0])
def test_what_the_error_advises(budget: float) -> None:
    eager = Advised().double()
    model = copy.deepcopy(eager)
    compiled = roundpipe_fx.compile(model, memory_budget=budget)
    for seed in range(2):
        x = torch.linspace(-seed, 1, 12, dtype=torch.float64).view(3, 4)
        expected, found = train_step(eager, eager, {"x": x}), train_step(compiled, model, {"x": x})
        torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-12, atol=1e-14)
