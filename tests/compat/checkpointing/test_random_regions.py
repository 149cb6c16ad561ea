"""Random trees of checkpoints and scopes are bitwise equal to the model without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import roundpipe_fx
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step


class Tree(nn.Module):
    """A random tree of layers: ``("layer", kind)``, or checkpoints and scopes with trees inside."""

    def __init__(self, tree: list[Any], plain: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tree, self.plain = tree, plain
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def walk(self, tree: list[Any], x: torch.Tensor) -> torch.Tensor:
        for kind, inside in tree:
            if kind == "layer":
                x = x + self.layer(inside, x)
            elif self.plain:
                x = self.walk(inside, x)
            elif kind == "scope":
                with roundpipe_fx.gradient_checkpoint_scope():
                    x = self.walk(inside, x)
            else:
                x = roundpipe_fx.checkpoint(self.walk, inside, x, preserve_rng_state=kind == "checkpoint")
        return x

    def layer(self, kind: int, x: torch.Tensor) -> torch.Tensor:
        y = self.linears[kind](x)
        if kind == 0:
            return torch.tanh(y)
        if kind == 1:
            return F.dropout(y, 0.3)
        if kind == 2:
            rows = (y.detach().sum(-1) > 0).nonzero()[:, 0]
            return x.index_add(0, rows, y[rows])
        return y.softmax(-1) * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.walk(self.tree, x).square().mean()


trees = st.recursive(
    st.lists(st.tuples(st.just("layer"), st.integers(0, 3)), min_size=1, max_size=3),
    lambda inside: st.lists(
        st.tuples(st.sampled_from(["checkpoint", "checkpoint", "scope", "no state"]), inside), min_size=1, max_size=3
    ),
    max_leaves=6,
)
random_settings = st.sampled_from(
    [{}, {"recompute": "full", "stages": 2}, {"memory_budget": 0.0}, {"memory_budget": 0.5, "stages": 2}]
)


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(trees, random_settings)
def test_random_trees_of_regions_have_the_same_bits(tree: list[Any], setting: dict[str, Any]) -> None:
    batch = {"x": torch.randn(16, 8, generator=torch.Generator().manual_seed(1))}
    plain = Tree(tree, plain=True)
    torch._dynamo.reset()
    reference = aot_eager_step(plain, batch)
    torch._dynamo.reset()
    step, compiled = compiled_step(Tree(tree, plain=False), batch, **setting)
    assert_bitwise(step, reference)
    loss = compiled(**batch)
    with roundpipe_fx.count_host_syncs() as syncs:
        loss.backward()
    assert syncs.total == 0
