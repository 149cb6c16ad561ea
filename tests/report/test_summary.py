"""``print(plan)`` fits a screen for any depth, and its figures are those of the plan."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.budget import bytes_text
from roundpipe_fx.ir.decisions import (
    GatheredStage,
    LiveValue,
    PlannedDivision,
    PlannedMesh,
    PlannedPipeline,
    PlannedTiles,
    PlannedValue,
)
from roundpipe_fx.report.summary import fold_path
from tests.pipeline.steps import Blocks, squares

_LINES = 40


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def _plan(depth: int, **options: Any) -> roundpipe_fx.Plan:
    model = nn.Sequential(*(_Block(8) for _ in range(depth)))
    compiled = roundpipe_fx.compile(model, **{"recompute": "full", **options})
    return compiled.trace(torch.randn(64, 8))


@pytest.mark.parametrize("depth", [1, 2, 24])
def test_a_screen_for_any_depth(depth: int) -> None:
    plan = _plan(depth)
    assert len(str(plan).splitlines()) <= _LINES
    assert "\n" not in repr(plan) and len(repr(plan)) < 200
    assert len(plan.details().splitlines()) > depth


def test_blocks_are_one_line_with_all_their_values() -> None:
    plan = _plan(12)
    recomputed = [value for stage in plan.stages for value in stage.recomputed]
    count = sum(value.module.endswith(".up") for value in recomputed)
    assert count > 6
    assert re.search(rf"\*\.up, test_summary.py:\d+ \({count} values\)", str(plan))


def test_what_is_alive_at_the_peak_adds_up_to_it() -> None:
    plan = _plan(6, memory_budget=0.0, recompute=None)
    assert sum(value.bytes for value in plan.peak.live) == plan.peak.bytes


def test_gradients_at_the_peak_are_one_row() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    plan = roundpipe_fx.compile(model, recompute="none").trace(torch.randn(2, 128))
    gradients = [value for value in plan.peak.live if value.gradient]
    assert sum(value.bytes for value in gradients) >= 128 * 128 * 4
    assert f"gradients ({len(gradients)} values)" in str(plan)


def test_what_no_module_computes_is_named_by_its_line() -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x).exp().sum()

    plan = roundpipe_fx.compile(Loss(), recompute="none").trace(torch.randn(64, 64, requires_grad=True))
    line = Loss.forward.__code__.co_firstlineno + 1
    alive = str(plan).split("alive at the peak")[1].split("stages,")[0]
    assert f"KiB  test_summary.py:{line}" in alive and "exp" not in alive


def test_what_no_module_computes_is_named_by_its_line_where_it_is_recomputed_or_hoisted() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = (x.sum(1) > 0).nonzero().squeeze(1)
            return ((x[rows] * x[rows]).exp() + 1).tanh().sum()

    plan = roundpipe_fx.compile(Own(), recompute="full").trace(torch.randn(64, 64, requires_grad=True))
    first = Own.forward.__code__.co_firstlineno
    text = str(plan)
    assert re.search(rf"^ +[\d.]+  test_summary.py:{first + 2}( \(\d+ values\))?, saved, ", text, re.M)
    assert re.search(rf"^  test_summary.py:{first + 1}( \(\d+ values\))?, \d+.*B: ", text, re.M)


def test_one_module_is_named_with_its_numbers() -> None:
    text = str(_plan(1))
    assert "0.up" in text and "*.up" not in text


def test_a_line_of_the_users_program_for_every_value() -> None:
    plan = _plan(2)
    values = [value for stage in plan.stages for value in (*stage.saved, *stage.recomputed)]
    source = Path(__file__).read_text().splitlines()
    for value in values:
        file, line = value.line.split(":")
        assert file == "test_summary.py" and "self.norm(x)" in source[int(line) - 1]


def test_hoisted_values_are_named_with_their_reason() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.route = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            best = self.route(x).argmax(1)
            result = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (best == number).nonzero().squeeze(1)
                result = result.index_add(0, rows, expert(x[rows]))
            return result

    plan = roundpipe_fx.compile(Experts(), recompute="full").trace(torch.randn(64, 8))
    text = str(plan)
    assert "computed once a step, never repeated:" in text
    assert len(text.splitlines()) <= _LINES


def test_a_pipeline_is_in_the_header() -> None:
    model = nn.Sequential(*(_Block(8) for _ in range(2)))
    compiled = roundpipe_fx.compile(model, devices=["cpu", "cpu"], num_microbatches=2)
    text = str(compiled.trace(torch.randn(8, 8)))
    assert len(text.splitlines()) <= _LINES
    assert re.search("pipelined: 2 microbatches by schedule '[^']+' on 2 devices, ", text)


def test_a_screen_for_what_stays_on_the_host(on_the_host: None) -> None:
    compiled = roundpipe_fx.compile(
        Blocks(32, 4), devices=["cpu"], num_microbatches=8, memory_budget=12_000_000, tiling="never"
    )
    x, y = torch.randn(2, 2048, 32)
    plan = compiled.trace(x, labels=y, loss_fn=squares)
    assert plan.pipeline is not None and plan.pipeline.offloaded
    text = str(plan)
    assert len(text.splitlines()) <= _LINES and "on 1 device;" in text
    assert f"and {plan.pipeline.sent_values} values ({bytes_text(plan.pipeline.sent_bytes)}) to the host and" in text
    own = [stage for stage in plan.stages if not stage.forward_seconds and not stage.recompute_seconds]
    assert f"backward {own[0].backward_seconds * 1e3:.3f} ms" in text and "forward 0.000 ms" not in text
    assert "\n" not in repr(plan) and plan._repr_html_().startswith("<pre>roundpipe_fx plan: ")


def test_a_screen_for_what_is_computed_in_tiles() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.Sequential(_Block(32), _Block(32)), nn.Linear(32, 4096)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.blocks(x)), labels)

    x, labels = torch.randn(512, 32), torch.randint(4096, (512,))
    plan = roundpipe_fx.compile(Logits(), memory_budget="3MiB").trace(x, labels)
    (tiles,) = plan.tiles
    text = str(plan)
    assert len(text.splitlines()) <= _LINES and "\n" not in repr(plan)
    assert f"in tiles, so sums round differently: head (float32[512, 4096], 8.0 MiB) in {tiles.tiles} tiles" in text


def test_a_screen_with_every_line_of_the_header_and_full_tables() -> None:
    plan = _plan(1)
    values = tuple(
        PlannedValue(
            name=f"v{i}", module=f"{letter}.block", type="float32[8]", bytes=32, reason=f"r{letter}", seconds=1.0
        )
        for i, letter in enumerate("abcdefghij")
    )
    pipeline = PlannedPipeline(
        schedule="1f1b",
        devices=("cpu",) * 20,
        microbatches=2,
        checkpoint="",
        makespan=1.0,
        bubble=0.1,
        peak_bytes=(1,) * 20,
        order="",
        host_to_device_bytes=1,
    )
    tiles = tuple(
        PlannedTiles(name=f"t{i}", module=f"m{i}", type=f"float32[{i}]", bytes=1, rows=8, tiles=2, seconds=1.0)
        for i in range(20)
    )
    stages = tuple(
        dataclasses.replace(plan.stages[0], index=i, modules=f"{letter}.block", recomputed=values, hoisted=values)
        for i, letter in enumerate("abcdefghij")
    )
    live = tuple(LiveValue(name=value.name, module=value.module, bytes=value.bytes) for value in values)
    full = dataclasses.replace(
        plan,
        budget=1,
        gathered_bytes=1,
        bucket_bytes=1,
        pipeline=pipeline,
        tiles=tiles,
        stages=stages,
        sizes={f"s{i}": i for i in range(50)},
        assumed={f"u{i}": i for i in range(50)},
        peak=dataclasses.replace(plan.peak, live=live),
    )
    assert len(str(full).splitlines()) == _LINES
    divided = dataclasses.replace(
        full,
        gathered_bytes=0,  # of models that are distributed already
        bucket_bytes=0,
        sizes={},  # a plan for a mesh is for the sizes that are given
        pipeline=dataclasses.replace(pipeline, host_to_device_bytes=0, gathered_bytes=(1,) * 20, mesh=_mesh_of(20, 40)),
    )
    text = str(divided)
    assert len(text.splitlines()) <= _LINES
    assert "ways to divide 40 devices: 40, of which 1 planned; 19 that were not planned may take less" in text
    assert "* 40 x 1 1 1f1b 1000.000 2.0 KiB" in " ".join(text.split())
    assert "≥ 500.000" in text and "… 34 more: plan.details()" in text
    assert divided.details().count("does not fit") == 10 and "34 more" not in divided.details()


def _mesh_of(devices: int, count: int) -> PlannedMesh:
    """A mesh that was chosen among others: the first; ten of them do not fit."""
    divisions = tuple(
        PlannedDivision(
            pipeline=1,
            replicas=count,
            sharded=bool(number),
            stages=1 + number,
            schedule="1f1b",
            seconds=None if number >= count - 10 else 1.0 if number == 0 else 0.5 + (number - 1) / (count - 2),
            bytes=2048,
            fits=number < count - 10,
            planned=number == 0,
            chosen=number == 0,
        )
        for number in range(count)
    )
    return PlannedMesh(
        replicas=2,
        sharded=True,
        weight_bytes=(1,) * devices,
        optimizer_bytes=(1,) * devices,
        collective_seconds=1.0,
        unhidden_seconds=0.5,
        divisions=divisions,
    )


def test_notebooks_get_the_summary_and_the_details() -> None:
    shown = _plan(2)._repr_html_()
    assert shown.startswith("<pre>roundpipe_fx plan: ") and "<details>" in shown
    assert "stage 1: " in shown


def test_numbers_between_dots_are_folded() -> None:
    assert fold_path("model.layers.12.mlp") == "model.layers.*.mlp"
    assert fold_path("transformer.h.3") == "transformer.h.*"
    assert fold_path("conv2d") == "conv2d"
    assert fold_path("0.up") == "*.up"
    assert fold_path("layers.1.ln … layers.2") == "layers.*.ln … layers.*"


def test_what_sharded_parameters_stay_gathered() -> None:
    plan = _plan(1)
    stages = [(0, 7, 7), (1, 4, 0), (2, 7, 3)]
    pipeline = PlannedPipeline(
        schedule="1f1b",
        devices=("cpu",),
        microbatches=2,
        checkpoint="",
        makespan=1.0,
        bubble=0.1,
        peak_bytes=(1,),
        order="",
        gathered_bytes=(4096,),
        gathered=tuple(GatheredStage(device=0, stage=i, bytes=1, gaps=gaps, kept=kept) for i, gaps, kept in stages),
    )
    shown = dataclasses.replace(plan, pipeline=pipeline)
    line = "sharded: a step gathers 4.0 KiB of parameters on the devices; parameters that stay gathered: "
    assert line + "stage 0, stage 2 (3 of 7 times)\n" in str(shown)
    assert roundpipe_fx.Plan.from_json(shown.to_json()).pipeline == pipeline
