"""The examples and the README's code run."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import roundpipe_fx

ROOT = Path(__file__).parent.parent


def _run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
def test_demo(tmp_path: Path) -> None:
    small = ("--steps", "3", "--layers", "2", "--width", "32", "--batch", "2", "--length", "32")
    output = _run("examples/demo.py", *small, "--out", str(tmp_path))
    assert "torch.utils.checkpoint" in output and "roundpipe_fx, 6 stages" in output
    (ours,) = [line for line in output.splitlines() if "roundpipe_fx, 6 stages" in line and "│" in line]
    assert ours.split("│")[3].strip() == "0"  # host syncs in the backward
    assert (tmp_path / "program.py").exists()


def _run_in_processes(script: str, *arguments: str, cwd: Path = ROOT) -> str:
    return _run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, *arguments, cwd=cwd)


@pytest.mark.long
def test_processes(tmp_path: Path) -> None:
    output = _run_in_processes("examples/processes.py", "--steps", "4", "--folder", str(tmp_path / "trained"))
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    owned = re.findall(r"rank \d has (\d+) parameters", output)
    assert len(owned) == 2 and (tmp_path / "trained" / ".metadata").exists()


@pytest.mark.long
def test_benchmark_of_processes() -> None:
    """Each way of training in two processes computes the same loss."""
    output = _run("-m", "benchmarks.processes", "--quick")
    rows = [line.split("│")[1:-1] for line in output.splitlines() if line.startswith("│")]
    assert [row[0].split(",")[0].strip() for row in rows] == [
        "roundpipe_fx",
        "roundpipe_fx",
        "torch.distributed.pipelining",
        "DistributedDataParallel",
        "FSDP2",
    ]
    losses = [float(row[-1]) for row in rows]
    assert max(losses) - min(losses) < 0.002


@pytest.mark.long
def test_many_processes(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/many-processes.md").read_text(), flags=re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    _run_in_processes("page.py", cwd=tmp_path)
    assert (tmp_path / "checkpoint" / ".metadata").exists()


def test_own_passes() -> None:
    *_, peaks, error = _run("examples/own_passes.py").splitlines()
    plain, cast = re.findall(r"([0-9.]+) MiB", peaks)
    assert float(cast) < 0.7 * float(plain)
    assert 0 < float(error.rsplit(" ", 1)[1]) < 1e-2


def _run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert blocks
    script = folder / "page.py"
    script.write_text("\n".join(blocks))
    monkeypatch.chdir(folder)
    return runpy.run_path(str(script))


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_page("README.md", tmp_path, monkeypatch)
    assert (tmp_path / "out" / "program.py").exists()


def test_how_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROUNDPIPE_FX_CACHE", "ROUNDPIPE_FX_PLAN_CACHE"):
        monkeypatch.setenv(name, "")  # which the page sets
    page = _run_page("docs/how-it-works.md", tmp_path, monkeypatch)
    assert page["file"].suffix == ".json" and page["plan"].budget is not None


def test_coming_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _run_page("docs/coming-from.md", tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert "operations (persistent for 1048576 bytes)" in printed and (tmp_path / "model.pt").exists()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the trainers
def test_with_your_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_page("docs/with-your-trainer.md", tmp_path, monkeypatch)
    assert (tmp_path / "trained" / "checkpoint-4" / "config.json").exists() and (tmp_path / "adapters").exists()
    assert (tmp_path / "saved" / ".metadata").exists()


def test_pytorch_bugs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_page("docs/pytorch-bugs.md", tmp_path, monkeypatch)


def test_coming_from_names_what_there_is() -> None:
    page = (ROOT / "docs/coming-from.md").read_text()
    for name in [*roundpipe_fx.compat.checkpointing.__all__, "Chain", "Checkpointable", "OptimizerCtx", "Sequence"]:
        assert name in page and hasattr(roundpipe_fx, name)
