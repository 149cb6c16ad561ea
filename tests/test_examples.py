"""The examples and the README's code run."""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import torch
import torch.distributed.checkpoint as dcp

import roundpipe_fx
from roundpipe_fx.compat import rotor
from roundpipe_fx.schedules import SCHEDULES
from tests.conftest import FullDisk
from tests.hugging_face import small_model_and_data

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
    lines = [line.split("│")[1:-1] for line in output.splitlines() if line.startswith("│")]
    rows, makespans = lines[:-2], lines[-2:]
    assert all(float(row[1]) > 0 for row in makespans)
    peers = ["torch.distributed.pipelining", "DistributedDataParallel", "FSDP2"]
    assert [row[0].split(",")[0].strip() for row in rows] == [*peers, *["roundpipe_fx"] * 6]
    losses = [float(row[-1]) for row in rows]
    assert max(losses) - min(losses) < 0.002


@pytest.mark.long
def test_many_processes(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/many-processes.md").read_text(), flags=re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    _run_in_processes("page.py", cwd=tmp_path)
    assert (tmp_path / "checkpoint" / ".metadata").exists()
    assert (tmp_path / "folder" / "model.safetensors.index.json").exists()


@pytest.mark.long
def test_own_passes() -> None:
    *_, peaks, error = _run("examples/own_passes.py").splitlines()
    plain, cast = re.findall(r"([0-9.]+) MiB", peaks)
    assert float(cast) < 0.7 * float(plain)
    assert 0 < float(error.rsplit(" ", 1)[1]) < 1e-2


@pytest.mark.long
def test_finetune_with_trainer(tmp_path: Path) -> None:
    output = _run("examples/finetune_with_trainer.py", "--steps", "5", "--out", str(tmp_path / "first"))
    assert "budget: 6.0 MiB" in output and (tmp_path / "first" / "config.json").exists()


def _losses(out: Path) -> list[str]:
    """Steps with their losses, without the seconds."""
    return [line.rsplit(",", 1)[0] for line in (out / "losses.csv").read_text().splitlines()[1:]]


@pytest.mark.long
def test_finetune(tmp_path: Path) -> None:
    """Interrupted and resumed, it has the losses and the weights of a run that went through."""
    model, data = small_model_and_data(tmp_path)
    through, stopped = tmp_path / "through", tmp_path / "stopped"

    def command(out: Path, *more: str) -> list[str]:
        sizes = ("--length", "32", "--batch", "4", "--microbatches", "2", "--rate", "1e-3", "--warmup", "2")
        how = ("--steps", "100", "--save-every", "10", "--device", "cpu", *sizes, *more)
        return [str(ROOT / "examples/finetune.py"), "--model", model, "--data", data, "--out", str(out), *how]

    assert "pipelined: 2 microbatches" in _run(*command(through))
    with subprocess.Popen([sys.executable, *command(stopped)], stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (stopped / "losses.csv").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and "--resume goes on from the last checkpoint" in said, said[-2000:]
    assert 10 <= len(_losses(stopped)) < 100
    _run(*command(stopped, "--resume"))
    assert _losses(stopped) == _losses(through) and len(_losses(through)) == 100
    assert (stopped / "losses.png").stat().st_size > 5_000
    one, other = ((out / "model" / "model.safetensors").read_bytes() for out in (through, stopped))
    assert one == other
    assert [folder.name for folder in stopped.glob("checkpoint-*")] == ["checkpoint-100"]
    # Of a model with adapters, weights that are frozen are not written again and again.
    _run(*command(tmp_path / "adapters", "--lora", "4", "--steps", "2"))
    files = [out.glob("checkpoint-*/*.distcp") for out in (through, tmp_path / "adapters")]
    sizes = [sum(file.stat().st_size for file in of) for of in files]
    assert sizes[1] < sizes[0] / 2 and (tmp_path / "adapters" / "model" / "adapter_model.safetensors").exists()


def test_an_interrupt_of_finetuning_that_is_dropped_comes_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        interrupts = runpy.run_path(str(ROOT / "examples/finetune.py"))["Interrupts"]()
        interrupts.check()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it was not raised at once")
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    finally:
        signal.signal(signal.SIGINT, before)


def test_losses_of_finetuning_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while they are written leaves those before."""
    draw = runpy.run_path(str(ROOT / "examples/finetune.py"))["draw"]
    draw([(0, 2.0, 1.0)], tmp_path)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("csv.writer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        draw([(0, 2.0, 1.0), (1, 1.5, 1.0)], tmp_path)
    assert _losses(tmp_path) == ["0,2.0"]


def test_checkpoints_of_finetuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: FullDisk) -> None:
    """One that cannot be written is told of, and the one before stays; so it is without memory for a copy."""
    made = runpy.run_path(str(ROOT / "examples/finetune.py"))["Checkpoints"]
    said: list[str] = []
    monkeypatch.setattr("tqdm.tqdm.write", said.append)
    for available in (2**40, 0):
        out = tmp_path / str(available)
        checkpoints = made(out)
        monkeypatch.setattr("psutil.virtual_memory", lambda left=available: argparse.Namespace(available=left))
        for step, is_full in ((10, False), (20, True), (30, False)):
            with full_disk() if is_full else contextlib.nullcontext():
                checkpoints.begin(step, {"weights": torch.full((50_000,), float(step)), "step": step})
                failed = checkpoints.finish()
            assert bool(failed) == is_full
            (kept,) = out.glob("checkpoint-*")
            assert checkpoints.whole() == [kept] and kept.name == f"checkpoint-{10 if is_full else step}"
            if failed:
                assert "checkpoint-20 was not written" in failed and "File too large" in failed
            read = {"weights": torch.zeros(50_000), "step": 0}
            dcp.load(read, checkpoint_id=kept, no_dist=True)
            assert read["weights"].eq(read["step"]).all() and kept.name.endswith(f"-{read['step']}")
    assert not said  # it was asked for each


@pytest.mark.long
def test_diffusion_unet() -> None:
    output = _run("examples/diffusion_unet.py", "--steps", "2", "--size", "16")
    assert "the same bits without a limit: True" in output
    whole, lowest = re.findall(r"([0-9.]+) MiB", output.splitlines()[-1])
    assert float(lowest) < 0.5 * float(whole)


@pytest.mark.long
def test_lora(tmp_path: Path) -> None:
    output = _run("examples/lora.py", "--layers", "2", "--width", "64", "--steps", "4", "--out", str(tmp_path))
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    peaks = re.findall(r"peak (\S+) of (\S+) planned", output.replace(",", ""))
    assert len(peaks) == 4 and all(int(peak) <= int(planned) for peak, planned in peaks)
    assert "AdamW's state" in output
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.long
def test_pipeline(tmp_path: Path) -> None:
    output = _run(str(ROOT / "examples/pipeline.py"), "--steps", "3", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    assert "2 devices" in output and (tmp_path / "timeline.json").exists()


@pytest.mark.long
def test_first_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook runs in a kernel of its own, and shows a plan, a picture and a comparison."""
    monkeypatch.setenv("ROUNDPIPE_FX_VERIFY", "0")
    notebook = nbformat.read(ROOT / "examples/first_plan.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells)  # what a run prints is not stored
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=folder).execute()
    printed = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert "roundpipe_fx plan: 6 stages" in printed and "gradients have the same bits: True" in printed
    (measured, allowed) = re.findall(r"([0-9,]+) bytes measured, ([0-9,]+) allowed", printed)[0]
    assert int(measured.replace(",", "")) <= int(allowed.replace(",", ""))
    peaks = {name: int(size.replace(",", "")) for name, size in re.findall(r"^(\S+) +([0-9,]+) bytes$", printed, re.M)}
    assert peaks["roundpipe_fx"] < peaks["torch.compile"] and peaks["roundpipe_fx"] < peaks["eager"]


@pytest.mark.long
def test_plan_for_a_gpu() -> None:
    small = ("--layers", "2", "--width", "128", "--lengths", "1024", "2048")
    output = _run("examples/plan_for_a_gpu.py", *small)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["1,024", "2,048"]
    assert all(float(lowest) <= float(whole) for _, whole, lowest, _ in rows)


def _run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert blocks
    script = folder / "page.py"
    script.write_text("\n".join(blocks))
    monkeypatch.chdir(folder)
    return runpy.run_path(str(script))


@pytest.mark.long
def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_page("README.md", tmp_path, monkeypatch)


@pytest.mark.quick_every(2)
def test_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("roundpipe_fx")
    level = logger.level
    try:
        _run_page("docs/index.md", tmp_path, monkeypatch)
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(level)
    assert (tmp_path / "out" / "program.py").exists()


@pytest.mark.long
def test_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = _run_page("docs/budgets.md", tmp_path, monkeypatch)
    assert page["tiled"].plan.tiles and page["answer"].peak_bytes <= 12 * 2**30
    assert page["syncs"].total == 0 and (tmp_path / "frontier.png").exists()


@pytest.mark.long
def test_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        page = _run_page("docs/pipelines.md", tmp_path, monkeypatch)
    finally:
        SCHEDULES.pop("breadth_first", None)  # which the page adds
    assert page["scheduled"].plan.pipeline.schedule == "given" and (tmp_path / "timeline.json").exists()
    assert page["breadth"].plan.pipeline.schedule == "breadth_first" and len(page["breadth"].plan.stages) == 4


def test_how_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROUNDPIPE_FX_CACHE", "ROUNDPIPE_FX_PLAN_CACHE"):
        monkeypatch.setenv(name, "")  # which the page sets
    page = _run_page("docs/how-it-works.md", tmp_path, monkeypatch)
    assert page["file"].suffix == ".json" and page["plan"].budget is not None


@pytest.mark.long
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


@pytest.mark.long
def test_pytorch_bugs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_page("docs/pytorch-bugs.md", tmp_path, monkeypatch)


def test_plan_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_page("docs/plan-page.md", tmp_path, monkeypatch)
    assert (tmp_path / "plan.html").stat().st_size < (tmp_path / "plans.html").stat().st_size
    page = (ROOT / "docs/plan-page.md").read_text()
    for picture in re.findall(r"!\[[^]]+\]\((.*?)\)", page):
        assert 10_000 < (ROOT / "docs" / picture).stat().st_size < 150_000


def test_coming_from_names_what_there_is() -> None:
    page = (ROOT / "docs/coming-from.md").read_text()
    for name in [*roundpipe_fx.compat.checkpointing.__all__, "OptimizerCtx"]:
        assert name in page and hasattr(roundpipe_fx, name)
    for name in ("Chain", "Checkpointable", "Sequence"):
        assert name in page and hasattr(rotor, name)


@pytest.mark.long
def test_long_sequence() -> None:
    """A budget that needs tiles of the loss and of the MLPs, and recomputation."""
    small = ("--layers", "2", "--width", "64", "--vocabulary", "512")
    output = _run("examples/long_sequence.py", "--tokens", "4096", "--budget", "15MiB", *small)
    assert "carried out in tiles" in output and "model.lm_head" in output and "gate_proj" in output
    found = re.search(r"loss ([0-9.]+), planned peak ([0-9]+) MiB", output)
    assert found is not None and abs(float(found[1]) - 6.3) < 0.3 and int(found[2]) <= 15


@pytest.mark.long
def test_gradients_of_a_long_sequence() -> None:
    """In double precision, beside the step with nothing in tiles."""
    make = runpy.run_path(str(ROOT / "examples/long_sequence.py"))["llama"]
    torch.manual_seed(0)
    model = make(2, 64, 512).double()
    tokens = torch.randint(512, (1, 4096))
    expected = torch.autograd.grad(model(tokens), [*model.parameters()])
    compiled = roundpipe_fx.compile(model, memory_budget="30MiB", tiling="auto")
    compiled(tokens).backward()
    assert len(compiled.plan.tiles) > 1 and compiled.plan.recompute_seconds > 0
    largest = max(gradient.norm() for gradient in expected)
    errors = [
        (parameter.grad - gradient).norm()
        for parameter, gradient in zip(model.parameters(), expected, strict=True)
        if parameter.grad is not None
    ]
    assert len(errors) == len(expected) and max(errors) < 1e-12 * largest
