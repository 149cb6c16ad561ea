"""Options, backends and plans of steps that only tiles make fit."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from tests.planner.tiled import assert_close, is_tiled, minimum, step
from tests.planner.tiled_models import MLP, WORDS, Head, batch, both, least


def test_copies_and_pickles() -> None:
    given = batch()
    plain, compiled = both(Head().double(), given)
    compiled(**given)
    assert is_tiled(compiled)
    expected = step(plain, plain, given)
    copied = copy.deepcopy(compiled)
    torch._dynamo.reset()
    assert_close(step(copied, copied, given), expected, 1e-12)
    loaded = pickle.loads(pickle.dumps(compiled))
    assert_close(step(loaded, loaded, given), expected, 1e-12)
    assert is_tiled(copied)


def test_the_torch_compile_backend() -> None:
    given = batch()
    model = Head().double()
    budget = minimum(model, given)
    plain = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="roundpipe_fx", options={"memory_budget": budget})
    assert_close(step(compiled, model, given), step(plain, plain, given), 1e-12)
    torch._dynamo.reset()
    refused = torch.compile(model, backend="roundpipe_fx", options={"memory_budget": budget, "tiling": "never"})
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError):
        refused(**given)


def test_options_that_are_wrong() -> None:
    with pytest.raises(ValueError, match="'auto', 'never'"):
        roundpipe_fx.compile(Head(), memory_budget=1.0, tiling="always")
    with pytest.raises(ValueError, match="recompute"):
        roundpipe_fx.compile(Head(), recompute="full", tiling="auto")
    with pytest.raises(ValueError):
        roundpipe_fx.compile(Head(), memory_budget=1.0, tiling=4)  # type: ignore[arg-type]


def test_never_is_refused_as_without_tiles() -> None:
    given = batch()
    model = Head().double()
    assert minimum(model, given, tiling="never") > 2 * minimum(model, given)
    assert minimum(model, given, tiling="never") > 64 * WORDS * 8


def test_shares_are_not_tiled() -> None:
    given = batch()
    for share in (0.0, 0.5, 1.0):
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(Head().double(), memory_budget=share)
        compiled(**given).backward()
        assert not is_tiled(compiled)


def _modelled(
    model: nn.Module, given: dict[str, torch.Tensor], budget: int | float, **options: Any
) -> tuple[float, int]:
    torch._dynamo.reset()
    plan = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=budget, **options).trace(**given)
    seconds = sum(s.forward_seconds + s.backward_seconds + s.recompute_seconds for s in plan.stages)
    return seconds, plan.peak_bytes


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(3))
        self.head = Head()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer.down(F.gelu(layer.up(x)))
        return self.head(x, y)


@pytest.mark.long
def test_wherever_it_pays_a_step_is_not_slower() -> None:
    given = batch()
    model = Deep().double()
    lowest = minimum(model, given, tiling="never")
    for budget in (0.0, 0.1, 0.4, 0.8, 1.0, lowest, lowest + lowest // 4):
        seconds, peak = _modelled(model, given, budget, tiling="auto")
        plain_seconds, _ = _modelled(model, given, budget, tiling="never")
        assert seconds <= plain_seconds * (1 + 1e-9)
        if isinstance(budget, int):
            assert peak <= budget


@pytest.mark.long
def test_several_budgets_in_one_process() -> None:
    given = batch()
    model = Deep().double()
    low, high = minimum(model, given), minimum(model, given, tiling="never")
    torch._dynamo.reset()
    models = [copy.deepcopy(model) for _ in range(3)]
    compiled = [
        roundpipe_fx.compile(one, memory_budget=b) for one, b in zip(models, (low, high, high - 1), strict=True)
    ]
    expected = step(model, model, given)
    for _ in range(2):
        for one in compiled:
            assert_close(step(one, one, given), expected, 1e-12)
    assert [is_tiled(one) for one in compiled] == [True, False, True]


@pytest.mark.long
def test_the_text_of_a_plan_runs() -> None:
    given = batch(61)
    compiled = least(Deep().double(), given)
    compiled(**given).backward()
    sources = compiled.plan.sources()
    ran = 0
    for module in compiled.plan.modules:
        text = sources[f"stage_{module.stage}.{module.phase}.py"]
        if text.startswith("#"):
            continue
        inputs = [node.meta["val"] for node in module.module.graph.find_nodes(op="placeholder")]
        arguments = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).uniform_(0.1, 1)
            if v.is_floating_point()
            else torch.zeros(v.shape, dtype=v.dtype)
            for v in inputs
        ]
        namespace: dict[str, Any] = {}
        exec(text, namespace)
        expected = module.module([a.clone() for a in arguments])
        found = namespace[module.name]([a.clone() for a in arguments])
        assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))
        ran += "for start in range" in text
    assert ran


def test_graphs_are_written_after_each_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_FX_DUMP", str(tmp_path))
    given = batch()
    compiled = least(Head().double(), given)
    compiled(**given).backward()
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert any("tiles" in name for name in written), sorted(written)
