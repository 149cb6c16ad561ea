"""The command of ``benchmarks.gpu`` and its results, with processes that measure nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import peers, syncs
from benchmarks.gpu.__main__ import main, with_first_step_of
from benchmarks.gpu.measurement import FIRST_STEP, SMALL
from benchmarks.gpu.order import groups
from benchmarks.gpu.results import Log, latest, path_of, read_runs
from benchmarks.gpu.tables import tables

_MACHINE = {"part": "machine", "card": "NVIDIA H200", "memory GiB": 139, "cores": 8, "torch": "2", "transformers": "5"}
_WORKER = f"""
import json, os, sys, time
order = json.loads(sys.stdin.readline())
name = order["measurement"]
if name == "machine":
    print(json.dumps({_MACHINE}))
elif name.startswith("Llama, torch.compile"):
    sys.exit("no such kernel")
elif name.startswith("budgets"):
    print(json.dumps({{"part": "budgets", "model": name}}), flush=True)
    time.sleep(600)
else:
    row = {{"part": {peers.PART!r}, "way": name, "{FIRST_STEP}": 1 + order["warm"], "before": len(order["rows"])}}
    print(json.dumps(row))
print(json.dumps({{"end": True}}))
"""
WORKER = (sys.executable, "-c", _WORKER)


def test_names_are_unique_and_the_table_beside_peers_comes_first() -> None:
    names = [item.name for group in groups(SMALL) for item in group]
    assert len(names) == len({*names})
    assert names[0] == "Llama, eager"


def test_each_row_is_stored_and_a_process_that_ends_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gpu.jsonl"
    for _ in range(2):
        main(["--output", str(path), "--minutes", "1", "--only", "Llama"], WORKER)
    first, second = read_runs(path)
    assert first.machine == second.machine == _MACHINE
    failed = [row for row in second.rows if row["part"] == "failed"]
    assert [row["measurement"] for row in failed] == [
        name for name in _names("Llama") if "Llama, torch.compile" in name
    ]
    assert failed[0]["error"] == "the process ended with 1: no such kernel"
    measured = [row for row in second.rows if row["part"] == peers.PART]
    assert len(measured) + len(failed) == len(_names("Llama"))
    # The seconds of a first step are those of the process that had nothing compiled; later groups read earlier rows.
    assert {row[FIRST_STEP] for row in measured} == {2}
    assert [row["before"] for row in measured] == [1] * 3 + [1 + len(peers.PEERS)] * (1 + len(peers.PEERS))


def _names(beginning: str) -> list[str]:
    return [item.name for group in groups(SMALL) for item in group if item.name.startswith(beginning)]


def test_a_measurement_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    begin = time.monotonic()
    main(["--small", "--output", str(path), "--minutes", "0.1", "--only", "budgets"], WORKER)
    assert time.monotonic() - begin < 30
    (run,) = read_runs(path)
    assert run.rows[0]["part"] == "budgets"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.long
def test_a_run_may_be_stopped_at_any_time(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "gpu.jsonl"
    arguments = ["--small", "--output", str(path), "--only", "budgets"]
    # A shell starts what runs in its background with ^C ignored, the tests among it.
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    text = f"{listening}; from benchmarks.gpu.__main__ import main; main({arguments!r}, {WORKER!r})"
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    children = _children(process.pid)
    assert children
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and errors.splitlines()[-1] == "stopped; the rows above are stored"
    assert path.read_text().splitlines() == [line.rstrip("\n") for line in lines]
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def _children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


@pytest.mark.long
def test_workers_end_with_the_process_that_has_started_them() -> None:
    """However it ends: nothing more comes from their standard input."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    worker = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert worker.stdin is not None
    worker.stdin.close()
    assert worker.wait(timeout=120) != 0


def test_a_line_that_was_not_written_to_its_end_is_left_out(tmp_path: Path) -> None:
    log = Log(tmp_path / "gpu.jsonl")
    for row in (_MACHINE, {"part": "a", "x": 1}, {"part": "b", "x": 2}, {"part": "a", "x": 3}):
        log.add(row)
    with (tmp_path / "gpu.jsonl").open("a") as file:
        file.write(json.dumps(_MACHINE) + '\n{"part": "a", "x"')
    runs = read_runs(tmp_path / "gpu.jsonl")
    assert [run.rows for run in runs] == [log.rows[1:], []]
    found = latest(runs, "a")
    assert found is not None and [row["x"] for row in found.rows] == [1, 3]
    assert latest(runs, "c") is None


def test_a_row_has_the_seconds_of_the_step_that_compiled() -> None:
    assert with_first_step_of({FIRST_STEP: 20.0}, {FIRST_STEP: 2.0, "ms": 1}) == {FIRST_STEP: 20.0, "ms": 1}
    for compiling in ({}, {"part": "failed"}, {FIRST_STEP: None}):
        assert with_first_step_of(compiling, {FIRST_STEP: 2.0}) == {FIRST_STEP: 2.0}


def test_tables_of_the_page_are_of_the_latest_run_that_has_rows(tmp_path: Path) -> None:
    path = tmp_path / path_of("NVIDIA H200").name
    assert path.name == "gpu_nvidia_h200.jsonl"
    log = Log(path)
    for row in (_MACHINE, {"part": syncs.PART, "way": "eager", "waits": 7}, {"part": "failed", "error": "lost"}):
        log.add(row)
    log.add({**_MACHINE, "torch": "3"})
    log.add({"part": peers.PART, "way": "eager", "ms": 94.7})
    log.add({"part": peers.PART, "way": "ours", "ms": None, "note": "in tiles: 2"})
    text = "\n".join(tables(tmp_path))
    assert text.index("Side by side") < text.index("Host synchronizations on a GPU")
    assert "| eager | 94.7 |  |" in text and "| ours |  | in tiles: 2 |" in text and "| eager | 7 |" in text
    assert "NVIDIA H200, torch 3, transformers 5." in text and "NVIDIA H200, torch 2, transformers 5." in text
    assert "| lost |" in text
    assert tables(tmp_path / "none") == []
