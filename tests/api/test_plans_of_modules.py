"""Plans of models that Dynamo runs with code which it compiled for another one."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.api.plans_of_modules import wrap_to_note_models

OPTIONS = {"memory_budget": "1GiB"}
X = torch.randn(4, 8)


class Adapted(nn.Module):
    """A base that several models may share, and an adapter of their own in the middle."""

    def __init__(self, base: nn.Module | None = None, broken: bool = False) -> None:
        super().__init__()
        self.base = base or nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
        self.adapter = nn.Linear(8, 8)
        self.broken = broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.adapter(self.base[0](x).relu())
        if self.broken:
            torch._dynamo.graph_break()
        return self.base[1](x)


def _compiled(way: str, model: nn.Module) -> Any:
    if way == "torch.compile":
        return torch.compile(model, backend="roundpipe_fx", options=OPTIONS)
    model.compile(backend="roundpipe_fx", options=OPTIONS)
    return model


@pytest.mark.parametrize("way", ["in place", "torch.compile"])
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.filterwarnings("ignore::roundpipe_fx.GraphBreakWarning", "ignore::roundpipe_fx.StepBudgetWarning")
def test_models_that_run_one_models_code_have_its_plans(way: str, broken: bool) -> None:
    torch._dynamo.reset()
    first = Adapted(broken=broken)
    shared = Adapted(broken=True).base if broken else first.base  # else graphs are equal in all parameters
    models = [first, copy.deepcopy(first), Adapted(shared, broken)]
    compiled = [_compiled(way, model) for model in models]
    never = Adapted(None if broken else shared, broken)
    compiled[0](X).sum().backward()
    plans = roundpipe_fx.plans(first)
    assert len(plans) == 1 + broken and [roundpipe_fx.plans(model) for model in models[1:]] == [(), ()]
    for _ in range(2):
        for model in compiled:
            model(X).sum().backward()
    for model in models:  # Dynamo compiled once for all
        assert set(map(id, roundpipe_fx.plans(nn.Sequential(model)))) == set(map(id, plans))
    assert roundpipe_fx.plans(never) == roundpipe_fx.plans(first.base) == roundpipe_fx.plans(first.adapter) == ()

    compiled[1](X[:2]).sum().backward()  # another compilation, for the second model's batch
    assert len(roundpipe_fx.plans(models[1])) > len(plans)
    with torch.no_grad():
        models[2].adapter.weight = nn.Parameter(models[2].adapter.weight.clone())
    assert len(roundpipe_fx.plans(models[2])) < len(plans)
    compiled[2](X).sum().backward()
    assert len(roundpipe_fx.plans(models[2])) >= len(plans)


def test_models_are_not_kept_alive() -> None:
    torch._dynamo.reset()
    models = [Adapted(), Adapted()]
    for model in models:
        _compiled("in place", model)(X).sum().backward()
    assert roundpipe_fx.plans(models[0]) == roundpipe_fx.plans(models[1]) != ()
    references = [weakref.ref(model) for model in models]
    del model, models
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_graph_without_parameters_runs_as_it_is() -> None:
    module = nn.Linear(2, 2)
    run = wrap_to_note_models(lambda *inputs: inputs, [module, nn.ReLU()], [])
    assert run() == () and run(X)[0] is X and run(X)[0] is X
    assert wrap_to_note_models(max, [], []) is max
