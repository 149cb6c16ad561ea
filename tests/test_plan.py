from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch

import roundpipe_fx
from roundpipe_fx.budget import bytes_text
from tests.golden_models import DropoutMLP, MixtureOfExperts, UNet


def test_printed_plan_names_every_kind_of_value() -> None:
    compiled = roundpipe_fx.compile(MixtureOfExperts(), stages=["layers.1"], recompute="full")
    text = str(compiled.trace(torch.randn(6, 8)))
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


def test_write(tmp_path: Path) -> None:
    compiled = roundpipe_fx.compile(UNet(), stages=2, recompute="full")
    files = compiled.trace(torch.randn(2, 3, 8, 8)).write(tmp_path / "out")
    assert {path.name for path in files} >= {"program.py", "stage_0.forward.py", "stage_1.backward.py"}
    for path in files:
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
