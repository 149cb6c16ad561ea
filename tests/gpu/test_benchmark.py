"""``benchmarks.gpu``, in its small form on emulated devices: each measurement yields its rows, and none fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import budgets, by_stage, forks, on_host, peers, syncs
from benchmarks.gpu.__main__ import WORKER, main
from benchmarks.gpu.measurement import SMALL, Measurement, Row
from benchmarks.gpu.order import groups
from benchmarks.gpu.results import read_runs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

_EMULATED = (
    "from tests.emulated_cuda.plugin import replace_inductor; replace_inductor(); "
    "from benchmarks.gpu.worker import main; main()"
)


def _rows(measurements: Sequence[Measurement]) -> list[Row]:
    rows: list[Row] = []
    for measurement in measurements:
        torch._dynamo.reset()
        rows += measurement.run(SMALL, rows)
    json.dumps(rows)
    return rows


def test_budgets_hold_and_the_least_that_is_named_can_be_met() -> None:
    rows = _rows(budgets.measurements(SMALL))
    settings = {(row["stages"], row["budget"], row["tiling"]) for row in rows}
    assert len(rows) == SMALL.budget_models * len(settings) and len(settings) == 9
    assert {row["within"] for row in rows} == {"yes"}
    for row in rows:
        assert 0 < row["measured bytes"] <= row["budget bytes"] and row["planned bytes"] <= row["budget bytes"]


@pytest.mark.parametrize("model", [peers.MODELS[0], pytest.param(peers.MODELS[1], marks=pytest.mark.long)])
def test_ours_are_held_against_each_peer_at_its_peak(model: str) -> None:
    rows = _rows([*peers.peer_measurements(model), *peers.our_measurements(model)])
    assert [row["way"] for row in rows] == [
        *peers.PEERS,
        "ours",
        *(f"ours at the peak of {peer}" for peer in peers.PEERS),
    ]
    peaks = {row["way"]: row["peak MiB"] for row in rows}
    for row in rows:
        if row["budget MiB"] is not None:
            assert row["budget MiB"] == peaks[row["way"].removeprefix("ours at the peak of ")]
            assert row["note"].startswith("refused: the least is") or row["peak MiB"] <= row["budget MiB"]
        assert row["note"] or (row["ms"] > 0 and row["peak MiB"] > 0 and row["first step s"] > 0)


def test_models_on_the_host() -> None:
    rows = _rows([*on_host.without_optimizer(), *on_host.with_optimizer(), *on_host.at_the_peaks_of_roundpipe()])
    by_optimizer = {row["optimizer"]: row for row in rows if row.get("way") == "ours"}
    assert list(by_optimizer) == list(on_host.OPTIMIZERS)
    assert all(0 < row["peak MiB"] <= row["planned MiB"] for row in by_optimizer.values())
    stages = [row for row in rows if row["part"] == by_stage.PART]
    assert {row["action"] for row in stages} > {"forward", "step"}


def test_seconds_by_stage() -> None:
    rows = _rows(by_stage.measurements())
    stages = {row["stage"] for row in rows}
    assert stages == {*range(SMALL.layers), "all"}
    for row in rows:
        assert row["measured / modelled"] == pytest.approx(row["measured ms"] / row["modelled ms"])


def test_steps_of_more_and_more_tokens() -> None:
    (last,) = (group for group in groups(SMALL) if group[0].name.startswith("the longest step"))
    rows = _rows(last)
    assert [row["tokens"] for row in rows] == list(SMALL.longest)
    assert all(row["peak MiB"] <= row["planned MiB"] for row in rows)


def test_a_checkpoint_waits_for_the_device_in_the_backward_and_ours_do_not() -> None:
    rows = {row["way"]: row["operators"] for row in _rows(syncs.measurements())}
    assert "nonzero" in rows["checkpoint per layer"]
    assert rows["ours, eager stages"] == rows["ours, inductor stages"] == "none"


def test_forks_are_left_out_of_the_one_and_are_in_the_other() -> None:
    rows = _rows(forks.measurements())
    assert {row["forks"] for row in rows if row["way"] == "one stream"} == {0}
    assert all(row["forks"] > 0 for row in rows if row["way"] != "one stream" and row["stages"] == "eager")


@pytest.mark.long
@pytest.mark.skipif("tests.emulated_cuda.plugin" not in sys.modules, reason="of the emulated devices")
def test_the_command_stores_a_line_a_row(tmp_path: Path) -> None:
    path = tmp_path / "results" / "gpu.jsonl"
    names = ("Llama, eager", "Llama, ours at the peak of eager", "fork and join, eager")
    worker = (*WORKER[:3], "-c", _EMULATED)
    main(["--small", "--minutes", "5", "--output", str(path), "--only", *names], worker)
    (run,) = read_runs(path)
    assert run.machine["card"] == torch.cuda.get_device_name()
    assert [(row["part"], row["way"]) for row in run.rows] == [
        (peers.PART, "eager"),
        (peers.PART, "ours at the peak of eager"),
        (forks.PART, "with a side stream"),
        (forks.PART, "one stream"),
    ]
