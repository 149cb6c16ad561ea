"""Blocks of a model whose loops take in the norm before an MLP, its backward and the residual sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe_fx.analysis.tiling import tiled_region
from tests.planner.tiled import check, minimum

ROWS, WIDTH = 256, 16


class Block(nn.Module):
    """A gated MLP with adapters, as LoRA adds them: three products make one gradient."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.down = norm(WIDTH), nn.Linear(8 * WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 8 * WIDTH, bias=False) for _ in range(2))
        self.first, self.second = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 8 * WIDTH, bias=False)
        self.gate.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h) + self.second(self.first(h))) * self.up(h))


class Blocks(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(norm) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


@pytest.mark.parametrize("norm", [nn.RMSNorm, pytest.param(nn.LayerNorm, marks=pytest.mark.long)])
def test_a_block_needs_three_residual_values(norm: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its input, the gradient of its output and that of its input; without its neighbours there are more."""
    value = ROWS * WIDTH * 8
    torch.manual_seed(0)
    model, batch = Blocks(norm).double(), {"x": torch.randn(1, ROWS, WIDTH, dtype=torch.float64)}
    least = minimum(model, batch)
    (outcome,) = check(model, batch, asked=[least])
    gradients = sum(p.numel() * 8 for p in model.parameters() if p.requires_grad)
    # The fourth is for what tiles of a block need.
    assert outcome.measured <= least < 4 * value + gradients
    monkeypatch.setattr(tiled_region, "take_in_neighbours", lambda growth, returned: growth)
    assert minimum(model, batch) > least + value


@pytest.mark.parametrize(("norm", "dtype"), [(nn.RMSNorm, torch.float32), (nn.LayerNorm, torch.bfloat16)])
@pytest.mark.long
def test_plans_say_what_compiled_tiles_allocate(norm: type[nn.Module], dtype: torch.dtype) -> None:
    """A compiled body returns what is to be added to sums, which an eager one adds at once."""
    torch.manual_seed(0)
    model, batch = Blocks(norm).to(dtype), {"x": torch.randn(1, ROWS, WIDTH, dtype=dtype)}
    least = minimum(model, batch, stage_compiler="inductor")
    (outcome,) = check(model, batch, asked=[least], stage_compiler="inductor")
    assert outcome.measured == outcome.planned == least
