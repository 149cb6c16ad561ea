"""At an out-of-memory error on a CUDA device the message says what is allocated there, and by whom."""

from __future__ import annotations

import contextlib
import gc
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.runtime.step_memory import allocated_bytes, device_memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 1 << 20
WIDTH, ROWS = 512, 4096


class _Tower(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@contextlib.contextmanager
def _little_left(mebibytes: int, device: str = "cuda:0") -> Iterator[int]:
    """Context manager in which another tensor, of as many bytes as are yielded, has all of a device but so much."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.empty(free - mebibytes * MIB, dtype=torch.uint8, device=device)
    yield held.nbytes
    del held


@contextlib.contextmanager
def _running_out() -> Iterator[pytest.ExceptionInfo[torch.OutOfMemoryError]]:
    with warnings.catch_warnings(), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        warnings.simplefilter("ignore")
        yield caught
    assert type(caught.value) is torch.OutOfMemoryError


_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _said(text: str, what: str) -> int:
    """The bytes that a message says of something; rounded there."""
    found = re.search(rf"{what} ([\d.]+) (\w*B)", text)
    assert found is not None, (what, text)
    return int(float(found[1]) * _UNITS[found[2]])


def _training() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = _Tower().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(ROWS, WIDTH, device="cuda")
    return model, optimizer, x


def test_what_is_allocated_is_told_apart() -> None:
    model, optimizer, x = _training()
    model(x).backward()
    optimizer.step()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    before = allocated_bytes(torch.device("cuda:0"))
    assert before == torch.cuda.memory_allocated("cuda:0")
    kept = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    memory = device_memory(torch.device("cuda:0"), before, [model, model.layers])
    assert memory.parameters == memory.gradients == weights
    steps = len([*model.parameters()]) * 4
    assert 2 * weights <= memory.optimizer <= 2 * weights + steps  # AdamW's counters may be on the host
    assert memory.of_step == kept.nbytes
    assert x.nbytes <= memory.others <= before - 4 * weights
    assert memory.available == memory.free + memory.reserved - before


@pytest.mark.parametrize("front_door", ["compile", "torch.compile"])
def test_a_budget_that_is_larger_than_what_is_left(front_door: str) -> None:
    model, optimizer, x = _training()
    model(x).backward()
    optimizer.step()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if front_door == "compile":
        compiled: Any = roundpipe_fx.compile(model, memory_budget="400MiB", stage_compiler="eager", tiling="never")
    else:
        options = {"memory_budget": "400MiB", "stage_compiler": "eager", "tiling": "never"}
        compiled = torch.compile(model, backend="roundpipe_fx", options=options)
    compiled(x).backward()  # libraries have allocated what they keep
    gc.collect()
    with _little_left(36), _running_out() as caught:
        compiled(x).backward()
    text = str(caught.value)
    plan = roundpipe_fx.plans(model if front_door == "torch.compile" else compiled)[-1]
    assert f"  plan: predicted peak {plan.peak_bytes / MIB:.1f} MiB, in stage_" in text
    for what in ("parameters and buffers", "gradients"):
        assert _said(text, what) == pytest.approx(weights, rel=0.02)
    assert _said(text, "optimizer state") == pytest.approx(2 * weights, rel=0.02)
    assert _said(text, "others") > 1 << 30
    assert 0 < _said(text, "allocated by the step so far") <= 48 * MIB
    (proposed,) = re.findall(r"memory_budget=(\S+),", text)
    size = int(proposed) if proposed.isdigit() else int(proposed.strip("'").removesuffix("MiB")) * MIB
    assert 0 < size < min(plan.peak_bytes, 60 * MIB)
    assert "optimizer.zero_grad()" in text and "free what others hold" in text
    assert "expandable_segments" not in text.partition("PyTorch's error: ")[0]


def test_memory_in_pieces_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, x = _training()
    compiled = roundpipe_fx.compile(model, memory_budget=1.0, stage_compiler="eager", tiling="never")
    compiled(x).backward()
    model.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    # Blocks of 4 MiB, which values of 8 MiB do not fit into, and as many between them that stay.
    count = compiled.plan.peak_bytes // (4 * MIB) + 8
    blocks = [torch.empty(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2 * count)]
    with _little_left(12):
        del blocks[::2]
        with _running_out() as caught:
            compiled(x).backward()
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        with _running_out() as other:
            compiled(x).backward()
    text = str(caught.value)
    assert _said(text, "reserved but not allocated") > 80 * MIB
    assert "  - PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text
    assert "PYTORCH_CUDA_ALLOC_CONF" not in str(other.value).partition("PyTorch's error: ")[0]


def test_what_earlier_calls_of_a_step_hold_is_the_steps() -> None:
    model, _, x = _training()
    compiled = roundpipe_fx.compile(model, memory_budget="400MiB", stage_compiler="eager", tiling="never")
    compiled(x).backward()
    model.zero_grad()
    gc.collect()
    before = torch.cuda.memory_allocated()
    loss = compiled(x)
    with _little_left(12) as others, _running_out() as caught:
        (loss + compiled(x)).backward()
    text = str(caught.value)
    # With the tensor that takes the rest meanwhile. What the first call saved is not in the second figure.
    assert _said(text, "allocated by the step so far") > others * 0.99
    assert _said(text, "allocated before it") == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize("way", ["forward_backward", "model"])
def test_in_a_pipeline_each_device_is_listed(way: str) -> None:
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cuda:0", "cuda:0"]
    model, _, x = _training()
    compiled = roundpipe_fx.compile(
        model, devices=devices, num_microbatches=2, memory_budget="400MiB", stage_compiler="eager", tiling="never"
    )

    def step() -> None:
        if way == "forward_backward":
            compiled.forward_backward(x)
        else:
            compiled(x).backward()

    step()
    model.zero_grad()
    gc.collect()
    with _little_left(20, devices[1]), _running_out() as caught:
        step()
    text = str(caught.value)
    for device in dict.fromkeys(devices):
        assert text.count(f"\n  {device}: ") == 4
    assert "; that of one microbatch alone in " in text
    step()


def test_the_snapshot_can_be_written_afterwards(tmp_path: Path) -> None:
    model, _, x = _training()
    compiled = roundpipe_fx.compile(model, memory_budget="400MiB", stage_compiler="eager", tiling="never")
    compiled(x).backward()
    gc.collect()
    with _little_left(36), _running_out():
        compiled(x).backward()
    snapshot = pickle.loads(compiled.plan.write_snapshot(tmp_path / "step.pickle").read_bytes())
    level = peak = 0
    for event in snapshot["device_traces"][0]:
        level += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        peak = max(peak, level)
    assert peak == compiled.plan.peak_bytes
    assert len(snapshot["device_traces"]) == 1  # nothing is recorded


@pytest.mark.hardware
def test_what_the_allocator_records_is_beside_the_plan(tmp_path: Path) -> None:
    model, _, x = _training()
    compiled = roundpipe_fx.compile(model, memory_budget=0.5, stage_compiler="eager", tiling="never")
    compiled(x).backward()
    torch.cuda.memory._record_memory_history()
    try:
        compiled(x).backward()
        snapshot = pickle.loads(compiled.plan.write_snapshot(tmp_path / "step.pickle").read_bytes())
    finally:
        torch.cuda.memory._record_memory_history(None)
    planned, recorded = snapshot["device_traces"][:2]
    assert {event["action"] for event in planned} == {"segment_alloc", "alloc", "free_requested", "free_completed"}
    assert any(event["action"] == "alloc" for event in recorded)
    assert planned[0].keys() - recorded[0].keys() <= {"pool_id", "compile_context", "user_metadata"}
    assert {segment["device"] for segment in snapshot["segments"]} == {0, 1}
    assert torch.cuda._memory_viz.trace_plot(snapshot) and torch.cuda._memory_viz.segsum(snapshot)
