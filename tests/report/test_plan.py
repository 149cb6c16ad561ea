from __future__ import annotations

import ast
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.budget import bytes_text
from tests.golden_models import DropoutMLP, MixtureOfExperts, TiedTransformer, UNet


def test_printed_plan_names_every_kind_of_value() -> None:
    compiled = roundpipe_fx.compile(MixtureOfExperts(), stages=["layers.1"], recompute="full")
    text = compiled.trace(torch.randn(6, 8)).details()
    assert "2 stages" in text and "recompute='full'" in text
    assert "stage 1: layers.1.router … layers.1" in text
    for kind in ("saved: ", "hoisted: ", "recomputed: "):
        assert kind in text
    assert "int64[u0, 2]" in text and "its size depends on data" in text and "decides a route" in text


def test_saved_bytes_are_those_that_live_between_forward_and_backward() -> None:
    model = DropoutMLP(width=64, depth=4)
    x = torch.randn(32, 64)
    for recompute in ("none", "full"):
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(model, stages=4, recompute=recompute)
        compiled(x).backward()
        model.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            loss = compiled(x)
            held = peak.current - loss.untyped_storage().nbytes()
            del loss
        assert held == compiled.plan.saved_bytes


def test_replayed_values_are_listed() -> None:
    compiled = roundpipe_fx.compile(DropoutMLP(), stages=2, recompute="full")
    plan = compiled.trace(torch.randn(4, 8))
    assert [value.module for stage in plan.stages for value in stage.replayed] == ["layers.0.2", "layers.1.2"]
    assert all(stage.recompute_seconds > 0 for stage in plan.stages)


@pytest.mark.parametrize("options", [{"recompute": "none"}, {"recompute": "full"}, {"memory_budget": 0.0}])
def test_a_stages_recompute_seconds_are_its_part_of_the_total(options: dict[str, Any]) -> None:
    compiled = roundpipe_fx.compile(DropoutMLP(), stages=2, **options)
    plan = compiled.trace(torch.randn(64, 8))
    lines = re.findall(r"recompute ([\d.]+)", plan.details())
    total = re.search(r"recomputed: ([\d.]+) ms", str(plan))
    assert total is not None and len(lines) == 2
    assert sum(map(float, lines)) == pytest.approx(float(total[1]), abs=2e-3)
    assert (plan.recompute_seconds > 0) == (options != {"recompute": "none"})
    repeated = [value.seconds * value.times for stage in plan.stages for value in stage.recomputed]
    assert plan.recompute_seconds == pytest.approx(sum(repeated))
    for stage in plan.stages:
        assert 0 <= stage.early_seconds <= stage.recompute_seconds + stage.backward_seconds


def test_write(tmp_path: Path) -> None:
    compiled = roundpipe_fx.compile(UNet(), stages=2, recompute="full")
    files = compiled.trace(torch.randn(2, 3, 8, 8)).write(tmp_path / "out")
    assert {path.name for path in files} >= {"program.py", "stage_0.forward.py", "stage_1.backward.py"}
    for path in files:
        compile(path.read_text(), str(path), "exec")


def test_names_longer_than_a_line_stay_whole(tmp_path: Path) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = [f"{'a_long_name_' * 12}{index}" for index in range(3)]
            self.weights = nn.ParameterDict({name: nn.Parameter(torch.randn(4, 4)) for name in names})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights.values():
                x = torch.tanh(x @ weight)
            return x.sum()

    compiled = roundpipe_fx.compile(Deep(), stages=1, recompute="full")
    compiled(torch.randn(2, 4)).backward()
    for path in compiled.plan.write(tmp_path):
        compile(path.read_text(), str(path), "exec")


def test_traceback_quotes_the_program() -> None:
    class Boom(Exception):
        pass

    def compiler(module: torch.fx.GraphModule, example_inputs: list):
        def run(*args):
            if "backward" in module._get_name():
                raise Boom
            return module.forward(*args)

        return run

    compiled = roundpipe_fx.compile(DropoutMLP(), stages=2, stage_compiler=compiler)
    loss = compiled(torch.randn(4, 8))
    with pytest.raises(Boom) as raised:
        loss.backward()
    lines = [frame.line or "" for frame in traceback.extract_tb(raised.tb)]
    assert any("stage_1_backward(call)" in line for line in lines)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.0 GiB")]
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert bytes_text(count) == text


def _budgeted() -> roundpipe_fx.Plan:
    tokens = torch.randint(16, (2, 8))
    return roundpipe_fx.compile(TiedTransformer(width=16, depth=3), memory_budget=0.2).trace(tokens, tokens)


def test_a_plan_within_a_budget_prints_what_binds() -> None:
    text = str(_budgeted())
    assert "training within a budget" in text and "budget: " in text
    assert "predicted peak: " in text and "_backward at " in text
    assert "ms modelled (forward" in text


def test_plans_are_read_back_from_json() -> None:
    for plan in (_budgeted(), roundpipe_fx.compile(MixtureOfExperts()).trace(torch.randn(6, 8))):
        again = roundpipe_fx.Plan.from_json(plan.to_json())
        assert again == plan and str(again) == str(plan) and again.details() == plan.details()
        with pytest.raises(RuntimeError, match="has no code"):
            again.sources()
    assert again.to_json() == plan.to_json()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "roundpipe_fx plan 1"}', '{"format": "other"}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a roundpipe_fx plan"):
        roundpipe_fx.Plan.from_json(text)


def test_explain_says_what_happens_to_a_value_and_what_it_would_cost_otherwise() -> None:
    plan = _budgeted()
    stages = plan.stages
    saved = next(value for stage in stages for value in stage.saved if value.bytes > 100)
    again = next(value for stage in stages for value in stage.recomputed)
    passing = next(value for stage in stages for value in stage.passing)
    assert "saved from forward to backward" in plan.explain(saved.name)
    assert f"{saved.recompute_seconds * 1e3:.3f} ms" in plan.explain(saved.name) and saved.recompute_seconds > 0
    assert "recomputed in the backward" in plan.explain(again.name)
    assert f"would hold {bytes_text(again.bytes)}" in plan.explain(again.name)
    assert "needed only by the forward" in plan.explain(passing.name)
    whole = plan.explain("blocks.1").splitlines()
    assert len(whole) > 4 and all(" in blocks.1" in line for line in whole)
    with pytest.raises(ValueError, match=r"no value and no module named 'block.1'.*'blocks.1"):
        plan.explain("block.1")


def test_explain_tells_hoisted_and_replayed_values() -> None:
    routed = roundpipe_fx.compile(MixtureOfExperts(), memory_budget=0.0).trace(torch.randn(6, 8))
    hoisted = next(value for stage in routed.stages for value in stage.hoisted)
    assert "never recomputed: " in routed.explain(hoisted.name)
    dropped = roundpipe_fx.compile(DropoutMLP(depth=3), stages=2, recompute="full").trace(torch.randn(4, 8))
    replayed = next(value for stage in dropped.stages for value in stage.replayed)
    assert "from its saved generator state" in dropped.explain(replayed.name)


def test_a_plan_is_a_report() -> None:
    """What runs is decided from the lowered graph: no code that plans or runs reads a field of a plan."""
    package = Path(roundpipe_fx.__file__).parent
    found = {
        f"{path.relative_to(package)}:{node.lineno}"
        for folder in ("remat", "compiler", "pipeline", "planner", "runtime", "distributed", "api")
        for path in (package / folder).glob("**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "plan"
        if node.attr != "__get__"
    }
    assert found == set()
