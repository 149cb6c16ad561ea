"""An encoder in microbatches with a loss of all rows outside has the gradients of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx

_ROWS = 32


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.wide = nn.ModuleList([nn.Linear(16, 512) for _ in range(4)])
        self.back = nn.ModuleList([nn.Linear(512, 16) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, wide, back in zip(self.layers, self.wide, self.back, strict=True):
            x = x + back(F.gelu(wide(layer(x))))
        return F.normalize(x, dim=-1)


def _loss(encoder: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    embeddings = encoder(torch.cat([first, second]))
    likeness = embeddings[:_ROWS] @ embeddings[_ROWS:].T / 0.07
    labels = torch.arange(_ROWS)
    return (F.cross_entropy(likeness, labels) + F.cross_entropy(likeness.T, labels)) / 2


@pytest.mark.parametrize("how", [{}, {"devices": ["cpu", "cpu"]}, {"memory_budget": 0.0}])
def test_gradients_are_those_of_the_whole_batch(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    encoder = _Encoder().double()
    first = torch.randn(_ROWS, 16, dtype=torch.float64)
    second = first + 0.1 * torch.randn_like(first)
    expected = _loss(encoder, first, second)
    gradients = torch.autograd.grad(expected, list(encoder.parameters()))
    model = roundpipe_fx.compile(encoder, num_microbatches=8, **how)
    loss = _loss(model, first, second)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    for parameter, gradient in zip(encoder.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-14)


def test_microbatches_need_less_memory() -> None:
    peaks = []
    first, second = torch.randn(_ROWS, 16), torch.randn(_ROWS, 16)
    for count in (1, 8):
        encoder = _Encoder()
        model = roundpipe_fx.compile(encoder, num_microbatches=count, memory_budget=0.0)
        for _ in range(2):
            encoder.zero_grad()
            with roundpipe_fx.measure_peak("cpu") as peak:
                _loss(model, first, second).backward()
        peaks.append(peak.bytes)
    gradients = sum(parameter.nbytes for parameter in encoder.parameters())
    assert peaks[1] - gradients < 0.4 * (peaks[0] - gradients)
