"""Copies of updated buffers count where plans are compared: a codebook that follows averages, as in VQ-VAE."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from roundpipe_fx import InfeasibleBudgetError


class Codebook(nn.Module):
    """Vector quantization: the nearest of 32 codes of width 16, which follow the encoder's outputs."""

    def __init__(self, sums: str) -> None:
        super().__init__()
        self.sums, self.encode, self.decode = sums, nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("codes", torch.linspace(-1, 1, 512).sin().view(32, 16))
        self.register_buffer("count", torch.ones(32))
        self.register_buffer("total", self.codes.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x)
        chosen = (z.square().sum(1, keepdim=True) - 2 * z @ self.codes.t() + self.codes.square().sum(1)).argmin(1)
        code = self.codes[chosen]
        with torch.no_grad():
            hot = F.one_hot(chosen, 32).to(x.dtype)
            total = hot.t() @ z if self.sums == "product" else torch.zeros_like(self.total).index_add_(0, chosen, z)
            self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.total.mul_(0.9).add_(total, alpha=0.1)
            self.codes.copy_(self.total / (self.count + 1e-5).unsqueeze(1))
        return F.mse_loss(self.decode(z + (code - z).detach()), x) + 0.25 * F.mse_loss(z, code.detach())


def _peaks(sums: str, rows: int, budget: int | float) -> tuple[int, int]:
    """Bytes: predicted and measured."""
    torch._dynamo.reset()
    eager = Codebook(sums)
    model = copy.deepcopy(eager)
    compiled = roundpipe_fx.compile(model, memory_budget=budget, tiling="never")
    measured = 0
    for seed in range(2):
        x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))
        for net, step in ((eager, eager), (model, compiled)):
            net.zero_grad()
            with roundpipe_fx.measure_peak() as peak:
                step(x).backward()
        torch.testing.assert_close(
            [*eager.state_dict().values(), *(own.grad for own in eager.parameters())],
            [*model.state_dict().values(), *(own.grad for own in model.parameters())],
            rtol=0,
            atol=0,
        )
        measured = max(measured, peak.bytes)
    return compiled.plan.peak_bytes, measured


@pytest.mark.parametrize("sums", ["product", "index_add"])
def test_a_smaller_share_never_has_a_larger_peak(sums: str) -> None:
    peaks = [_peaks(sums, 8, share)[0] for share in (0.0, 0.5, 0.8, 1.0)]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize(("sums", "rows"), [("product", 8), ("index_add", 8), ("index_add", 64)])
def test_the_least_bytes_are_those_of_the_best_plan(sums: str, rows: int) -> None:
    with pytest.raises(InfeasibleBudgetError) as refused:
        _peaks(sums, rows, 1)
    least = refused.value.minimum
    assert least <= min(_peaks(sums, rows, share)[0] for share in (0.0, 1.0))
    assert max(_peaks(sums, rows, least)) <= least
