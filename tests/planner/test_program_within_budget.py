"""Plans for one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe_fx


class Net(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.long
def test_programs_that_save_less_than_was_planned_recompute_less() -> None:
    """What is fused into its readers is not saved, so a budget of these programs' own peak recomputes nothing."""
    model, x = Net(), torch.randn(256, 32)
    peaks = []
    for budget in (1.0, 0.0):
        peaks.append(roundpipe_fx.compile(model, memory_budget=budget, stage_compiler="inductor").trace(x).peak_bytes)
    eager = roundpipe_fx.compile(model, memory_budget=1.0).trace(x)
    assert peaks[0] < 0.8 * eager.peak_bytes
    whole = roundpipe_fx.compile(model, memory_budget=peaks[0], stage_compiler="inductor").trace(x)
    assert whole.peak_bytes <= peaks[0] and whole.recompute_seconds == 0
    half = sum(peaks) // 2
    assert roundpipe_fx.compile(model, memory_budget=half, stage_compiler="inductor").trace(x).peak_bytes <= half
