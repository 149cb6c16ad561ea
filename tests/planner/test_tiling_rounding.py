"""What tiles round: gradients are as near to exact ones as without tiles."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from roundpipe_fx.ir.decisions import PlannedTiles
from tests.planner.tiled import TOLERANCE, assert_close, is_tiled, minimum, step

WORDS, WIDTH = 32_768, 16


class Head(nn.Module):
    """A head of many words, whose gradients by rows are sums over all of these."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, words, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(x))), y)


@pytest.mark.parametrize(("rows", "words", "least"), [(64, 1024, 2), (65, 1024, 2), (64, WORDS, 16), (67, WORDS, 16)])
@pytest.mark.long
def test_rows_of_a_tile(rows: int, words: int, least: int) -> None:
    """Other kernels compute products with a vector, and those of few rows round long sums term by term."""
    for loop in tiles_at_the_least_budget(rows, words):
        size = -(-loop.rows // loop.tiles)
        assert size >= least and not 0 < loop.rows % size < least


@pytest.mark.long
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
