from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import roundpipe_fx
from tests.comparison import aot_eager_step, assert_bitwise, train_step


class Regions(nn.Module):
    """Four layers, the middle two in a region; the third in one inside it."""

    def __init__(self, budget: object = None, inner: object = None) -> None:
        super().__init__()
        self.budget, self.inner = budget, inner
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = self.layers
        x = x + first(x)
        if self.budget is not None:
            with roundpipe_fx.memory_budget(self.budget):
                x = x + second(x)
                if self.inner is not None:
                    with roundpipe_fx.memory_budget(self.inner):
                        x = x + third(x)
                else:
                    x = x + third(x)
        else:
            x = x + third(x + second(x))
        return (x + fourth(x)).square().mean()


def _recomputed(model: nn.Module, **options: object) -> set[str]:
    torch._dynamo.reset()
    x = torch.randn(64, 16)
    reference = aot_eager_step(model, {"x": x})
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(own, fullgraph=True, **options)
    assert_bitwise(train_step(compiled, own, {"x": x}), reference)
    return {value.module.split(".")[1] for stage in compiled.plan.stages for value in stage.recomputed if value.module}


@pytest.mark.long
def test_a_region_recomputes_and_the_rest_does_not() -> None:
    assert _recomputed(Regions(1.0)) == set()
    assert _recomputed(Regions(0.0)) == {"1", "2"}


def test_bytes_bound_what_is_kept_of_a_region() -> None:
    assert _recomputed(Regions("1 GiB")) == set()
    assert _recomputed(Regions("1 kB")) == {"1", "2"}


def test_the_innermost_region_counts() -> None:
    assert _recomputed(Regions(1.0, 0.0)) == {"2"}
    assert _recomputed(Regions(0.0, 1.0)) == {"1"}


@pytest.mark.long
def test_a_region_is_a_constraint_beside_a_budget() -> None:
    assert _recomputed(Regions(0.0), memory_budget="1 GiB") == {"1", "2"}


def test_outside_compilation_a_region_does_nothing_but_check_its_budget() -> None:
    torch.manual_seed(0)
    model = Regions(0.3)
    x = torch.randn(4, 16)
    expected = model(x)
    model.budget = 0.9
    assert torch.equal(model(x), expected)
    with pytest.raises(ValueError, match="a float is a fraction"), roundpipe_fx.memory_budget(1.5):
        pass
    with pytest.raises(KeyError), roundpipe_fx.memory_budget(0.5):
        raise KeyError  # an exception passes through
