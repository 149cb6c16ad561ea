"""What tiles round: gradients are as near to exact ones as without tiles."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from roundpipe_fx.report.plan_parts import PlannedTiles
from tests.compiler.tiled import TOLERANCE, assert_close, is_tiled, minimum, step

WORDS, WIDTH = 32_768, 16


class Head(nn.Module):
    """A head of many words, whose gradients by rows are sums over all of these."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, words, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(x))), y)


@pytest.mark.parametrize("rows", [64, 65])
def test_no_tile_has_one_row(rows: int) -> None:
    """A product with one row is one with a vector, which other kernels compute."""
    for loop in tiles_at_the_least_budget(rows, WORDS):
        size = -(-loop.rows // loop.tiles)
        assert size > 1 and loop.rows % size != 1


def test_sums_are_of_few_tiles() -> None:
    """A sum is rounded once for each tile."""
    assert max(loop.tiles for loop in tiles_at_the_least_budget(1 << 14, 512)) <= 2048


def tiles_at_the_least_budget(rows: int, words: int) -> tuple[PlannedTiles, ...]:
    """Those of a step at the least budget, with gradients as close to those without tiles as is promised."""
    torch.manual_seed(0)
    model = Head(words)
    given = {"x": torch.randn(rows, WIDTH), "y": torch.randint(0, words, (rows,))}
    plain = copy.deepcopy(model)
    budget = minimum(model, given)
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=budget)
    found = step(compiled, model, given)
    assert is_tiled(compiled)
    assert_close(found, step(plain, plain, given), TOLERANCE[torch.float32])
    return compiled.plan.tiles
