"""Microbatches of one step are cut into the same stages, and their results are those of the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx


class Losses(nn.Module):
    """Three losses, whose seconds do not grow alike with the rows."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = y.flatten(1)
        entropy = F.binary_cross_entropy_with_logits(rows, (rows > 0.3).to(rows.dtype), reduction="none")
        x = x * 1.25
        x[:, :1], x[:, -1:] = x[:, -1:].clone(), x[:, :1].clone()
        products = roundpipe_fx.checkpoint(self.products, y)
        return products.square().mean() + x.sort(2).values.square().mean() + (entropy**3).tanh().mean()

    def products(self, y: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bld,ble->bde", y, y) / y.shape[1]


@pytest.mark.long
def test_a_microbatch_that_an_earlier_step_cut_otherwise() -> None:
    model = Losses()
    compiled = roundpipe_fx.compile(
        model, devices=["cpu", "cpu"], num_microbatches=4, schedule="roundpipe", checkpoint="except_last"
    )

    def step(rows: int) -> int:
        batch = [torch.randn(rows, 3, width, dtype=torch.float64, requires_grad=True) for width in (10, 8)]
        compiled(*batch).backward()
        expected = torch.autograd.grad(model(*batch), batch)
        for x, gradient in zip(batch, expected, strict=True):
            torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=1e-14)
        return len(compiled.plans)

    step(4)  # microbatches of one row
    step(6)  # of two rows and of one: the latter's stages were cut for it alone
    plans = step(4)
    assert step(6) == plans  # they stay as they were cut together


class Parts(nn.Module):
    """Returns views of one result: each of them has a gradient of its own, or they have one together."""

    def __init__(self, also_whole: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.also_whole = also_whole

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = self.linear(x)
        parts = (*whole.unbind(1), *whole.chunk(2, 1))
        return (*parts, whole) if self.also_whole else parts


@pytest.mark.parametrize("also_whole", [False, True])
def test_results_that_are_views_of_one_another_keep_their_own_gradients(also_whole: bool) -> None:
    model = Parts(also_whole)
    x = torch.randn(4, 8, requires_grad=True)

    def gradients(run: nn.Module) -> tuple[torch.Tensor, ...]:
        loss = sum((place + 1) * part.square().sum() for place, part in enumerate(run(x)))
        return torch.autograd.grad(loss, [x, *model.parameters()])

    expected = gradients(model)
    for microbatches in (1, 2):
        compiled = roundpipe_fx.compile(model, num_microbatches=microbatches)
        for one, other in zip(gradients(compiled), expected, strict=True):
            torch.testing.assert_close(one, other)
