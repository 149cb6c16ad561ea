"""Planned memory as PyTorch's memory visualizer reads it."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

import roundpipe_fx
from roundpipe_fx.analysis.memory_timeline import Lifetime, MemoryTimeline, Moment
from roundpipe_fx.report import plan as plan_module
from roundpipe_fx.report.memory_snapshot import changes_of_step
from roundpipe_fx.report.plan_details import EmittedStep
from tests.golden_models import DropoutMLP, TiedTransformer
from tests.pipeline.steps import CPUS, Blocks

Snapshot = dict[str, Any]

READ_BY_THE_VISUALIZER = (
    "APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST EMPTY_TUPLE "
    "FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS "
    "SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3"
)
"""Opcodes that its JavaScript knows (torch/utils/viz/MemoryViz.js); any other one is an error there."""


@pytest.fixture(scope="module")
def plan() -> roundpipe_fx.Plan:
    tokens = torch.randint(16, (2, 8))
    return roundpipe_fx.compile(TiedTransformer(width=16, depth=4), memory_budget=0.2).trace(tokens, tokens)


def _read(path: Path) -> Snapshot:
    return pickle.loads(path.read_bytes())


def _levels(trace: list[Snapshot]) -> list[int]:
    """Bytes allocated after each event; raises where blocks overlap, or what is freed is not allocated."""
    live: dict[int, int] = {}
    levels = []
    for event in trace:
        if event["action"] == "alloc":
            end = event["addr"] + event["size"]
            assert all(end <= address or address + size <= event["addr"] for address, size in live.items())
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
        levels.append(sum(live.values()))
    return levels


def _check_format(snapshot: Snapshot) -> None:
    """Have each function of PyTorch's read it."""
    lines = _memory_viz.memory(snapshot, lambda text: text).splitlines()
    assert lines and all(line.rpartition(" ")[2].isdigit() for line in lines)
    assert _memory_viz.segments(snapshot, lambda text: text)
    assert _memory_viz.compare(snapshot["segments"], [], lambda text: text)
    assert "segments: " in _memory_viz.segsum(snapshot)
    assert "cudaMalloc" in _memory_viz.trace(snapshot)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "MemoryViz.js" in plot(snapshot)
    assert _memory_viz.trace_plot(pickle.loads(pickle.dumps(snapshot)), filter_freed=True)
    assert _memory_viz.trace_plot(snapshot, plot_segments=True)


def test_pytorchs_functions_read_it(
    plan: roundpipe_fx.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan.write_snapshot(tmp_path / "step.pickle")
    snapshot = _read(path)
    _check_format(snapshot)
    assert "free_completed without" not in capsys.readouterr().out
    (segment,) = snapshot["segments"]
    allocated = sum(block["requested_size"] for block in segment["blocks"] if block["state"] == "active_allocated")
    assert allocated == _levels(snapshot["device_traces"][0])[-1]
    assert _memory_viz.calc_active(segment) == segment["allocated_size"] >= allocated
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(path.read_bytes())}
    assert opcodes <= set(READ_BY_THE_VISUALIZER.split())


def test_as_many_bytes_as_the_peak_are_alive_at_most(plan: roundpipe_fx.Plan, tmp_path: Path) -> None:
    (trace,) = _read(plan.write_snapshot(tmp_path / "step.pickle"))["device_traces"]
    assert max(_levels(trace)) == plan.peak_bytes
    gradients = sum(value.bytes for value in plan.look_into().step.memory.values if value.gradient)
    assert gradients <= _levels(trace)[-1] < plan.peak_bytes
    times = [event["time_us"] for event in trace]
    assert times == sorted(times)


def test_frames_are_lines_of_the_emitted_code_and_of_the_user(plan: roundpipe_fx.Plan, tmp_path: Path) -> None:
    (trace,) = _read(plan.write_snapshot(tmp_path / "step.pickle"))["device_traces"]
    allocated = [event["frames"] for event in trace if event["action"] == "alloc"]
    sources, modules = plan.sources(), set()
    for emitted, *user in allocated:
        if emitted["line"]:
            line = sources[emitted["filename"]].splitlines()[emitted["line"] - 1]
            assert " = " in line
        for frame in user:
            assert frame["filename"] == "golden_models.py" and frame["line"] > 0
            modules.add(frame["name"])
    assert {f"blocks.{block}.attention.query" for block in range(4)} <= modules
    assert "model" in modules  # the loss, which is in no module of its own
    names = [emitted["name"] for emitted, *_ in allocated]
    assert any("recomputes" in name for name in names) and any("a gradient" in name for name in names)
    assert any(name.endswith("in stage_0_forward") for name in names)


def test_a_plan_from_json_has_the_same(plan: roundpipe_fx.Plan, tmp_path: Path) -> None:
    stored = roundpipe_fx.Plan.from_json(plan.to_json())
    paths = [one.write_snapshot(tmp_path / name) for one, name in ((plan, "made"), (stored, "stored"))]
    assert _read(paths[0]) == _read(paths[1])


@pytest.mark.parametrize("budget", [0.0, 1.0, None])
def test_other_plans(budget: float | None, tmp_path: Path) -> None:
    compiled = roundpipe_fx.compile(DropoutMLP(), memory_budget=budget)
    training = compiled.trace(torch.randn(6, 8))
    with torch.no_grad():
        inference = compiled.trace(torch.randn(6, 8))
    for other in (training, inference):
        snapshot = _read(other.write_snapshot(tmp_path / "step.pickle"))
        _check_format(snapshot)
        assert max(_levels(snapshot["device_traces"][0])) == other.peak_bytes


def test_workspaces_and_what_an_allocator_adds_are_in_it() -> None:
    moments = (
        Moment(call="stage_0_forward", value="mm", module="up", line="model.py:3", bytes=1024, workspace=0),
        Moment(call="stage_0_forward", value="mul", module="", line="", bytes=3584, workspace=512),
        Moment(call="the caller", value="loss", module="", line="", bytes=2048, workspace=8),
    )
    values = (
        Lifetime(name="mm", origin="mm", module="up", line="model.py:3", bytes=1000, first=0, last=1, gradient=False),
        Lifetime(name="mul", origin="mul", module="", line="", bytes=2000, first=1, last=2, gradient=False),
    )
    memory = MemoryTimeline(moments=moments, values=values, forward=2, source={})
    changes = changes_of_step(EmittedStep(memory=memory, lines={}))
    live: dict[int, int] = {}
    highest = [0] * len(moments)
    for change in changes:
        live[change.number] = change.bytes
        highest[change.microseconds] = max(highest[change.microseconds], sum(live.values()))
    assert highest == [moment.bytes for moment in moments]
    named = [change.frames[0]["name"] for change in changes if change.bytes]
    assert [name for name in named if "workspace" in name] == ["workspace of mul", "workspace of loss"]
    assert sum("blocks beyond" in name for name in named) == 3


def test_of_a_pipeline_each_device_has_a_trace(tmp_path: Path) -> None:
    compiled = roundpipe_fx.compile(Blocks(), devices=CPUS, num_microbatches=4, memory_budget=0.3)
    plan = compiled.trace(torch.randn(8, 16))
    snapshot = _read(plan.write_snapshot(tmp_path / "step.pickle"))
    _check_format(snapshot)
    assert plan.pipeline is not None
    assert tuple(max(_levels(trace)) for trace in snapshot["device_traces"]) == plan.pipeline.peak_bytes
    assert [segment["device"] for segment in snapshot["segments"]] == [0, 1]
    frames = [event["frames"] for event in snapshot["device_traces"][1] if event["action"] == "alloc"]
    names = plan.sources()["schedule.txt"].splitlines()[2].split()
    assert [innermost["name"].split()[0] for innermost, _ in frames] == [name for name in names if ":" not in name][
        -len(frames) :
    ]
    assert {stage["name"] for _, stage in frames} <= {stage.modules for stage in plan.stages}
    stored = roundpipe_fx.Plan.from_json(plan.to_json())
    assert _read(stored.write_snapshot(tmp_path / "stored.pickle")) == snapshot


def test_a_pipeline_without_a_timeline_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = roundpipe_fx.compile(Blocks(), devices=CPUS, num_microbatches=4).trace(torch.randn(8, 16))
    monkeypatch.setattr(plan_module, "_MOST_ACTIONS", 3)
    stored = roundpipe_fx.Plan.from_json(plan.to_json())
    with pytest.raises(RuntimeError, match="more than 3 actions"):
        stored.write_snapshot(tmp_path / "step.pickle")
    plan.write_snapshot(tmp_path / "step.pickle")


def test_what_the_allocator_has_recorded_is_behind_it(
    plan: roundpipe_fx.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {"addr": 4096, "size": 600, "stream": 0, "time_us": 7, "frames": []}
    block = {"address": 4096, "size": 1024, "requested_size": 600, "state": "active_allocated", "frames": []}
    segment = {"device": 0, "address": 4096, "total_size": 1024, "allocated_size": 1024, "stream": 0, "blocks": [block]}
    recorded: Mapping[str, Any] = {
        "segments": [segment],
        "device_traces": [[{"action": "alloc", **event}], []],
        "allocator_settings": {"expandable_segments": True},
        "external_annotations": [],
    }
    monkeypatch.setattr(plan_module, "recorded_history", lambda: recorded)
    snapshot = _read(plan.write_snapshot(tmp_path / "step.pickle"))
    _check_format(snapshot)
    assert [len(trace) > 1 for trace in snapshot["device_traces"]] == [True, False, False]
    assert snapshot["device_traces"][1:] == recorded["device_traces"]
    assert [segment["device"] for segment in snapshot["segments"]] == [0, 1]
    assert snapshot["allocator_settings"] == recorded["allocator_settings"]
    assert recorded["segments"][0]["device"] == 0
