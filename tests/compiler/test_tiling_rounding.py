"""What tiles round: gradients are as near to exact ones as without tiles."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from tests.compiler.tiled import TOLERANCE, assert_close, is_tiled, minimum, step

WORDS, WIDTH = 32_768, 16


class Head(nn.Module):
    """A head of many words, whose gradients by rows are sums over all of these."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(x))), y)


@pytest.mark.parametrize("rows", [64, 65])
def test_no_tile_has_one_row(rows: int) -> None:
    """A product with one row is one with a vector, whose kernel adds up one term after another."""
    torch.manual_seed(0)
    model = Head()
    given = {"x": torch.randn(rows, WIDTH), "y": torch.randint(0, WORDS, (rows,))}
    plain = copy.deepcopy(model)
    budget = minimum(model, given)
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=budget)
    found = step(compiled, model, given)
    assert is_tiled(compiled)
    for loop in compiled.plan.tiles:
        size = -(-loop.rows // loop.tiles)
        assert size > 1 and loop.rows % size != 1
    assert_close(found, step(plain, plain, given), TOLERANCE[torch.float32])
