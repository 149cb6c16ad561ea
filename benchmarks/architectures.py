"""How many of Hugging Face's architectures train, and with which bits: a small model of each.

python -m benchmarks.architectures                  # all: takes long
python -m benchmarks.architectures causal           # of one task
python -m benchmarks.architectures causal/gpt2 …    # one

Each runs in a process of its own: eagerly, with ``torch.compile(backend="aot_eager")``, and compiled four ways here.
Loss, gradients and buffers are held against aot_eager bit for bit, then against eager: traced models build causal
masks, which are left out here as eagerly. What differs from both is held against what Dynamo traced run eagerly: a
model may take another path while it is traced. Where aot_eager fails, that is what is compared with, within rounding.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from rich.progress import track
from torch import fx, nn
from torch._dynamo.backends.debugging import aot_eager

import roundpipe_fx
from benchmarks.side_by_side import report
from benchmarks.small_models import TASKS, architectures, small_batch, small_model
from roundpipe_fx.ir.resolved_branches import keep_resolved_random_branches
from roundpipe_fx.torch_private import dynamo_flags

WAYS: dict[str, dict[str, Any]] = {
    "none": {"stages": 2, "recompute": "none"},
    "full": {"stages": 2, "recompute": "full"},
    "budget 0.0": {"memory_budget": 0.0},
    "1f1b": {"stages": 2, "devices": ["cpu"], "num_microbatches": 1, "schedule": "1f1b"},
}
"""How models are compiled here."""

_TRAINS, _SAME, _ROUNDED = "trains", "same bits as aot_eager", "as eager within rounding"
_AS_EAGER, _AS_TRACED = "same bits as eager", "same bits as the traced graph run eagerly"
_PARTS = ", in parts"
"""Added where the graph broke."""
_ROUNDING = 1e-5
_PATIENCE = 600
"""Seconds for one architecture."""


def main() -> None:
    asked = sys.argv[1:] or list(TASKS)
    names = [f"{task}/{name}" for task in TASKS if task in asked for name in architectures(task)]
    names += [name for name in asked if "/" in name]
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        rows = list(track(workers.map(_in_a_process, names), "architectures", len(names)))
    tried = [row for row in rows if "not tried" not in row]
    if len(names) > 1:
        title = f"{len(names)} architectures, of which {len(tried)} could be tried: how many train"
        report("architectures_summary", title, [_summary(way, tried) for way in ("aot_eager", *WAYS)])
        report("architectures", "by architecture", [{key: row.get(key, "") for key in _COLUMNS} for row in rows])
    for row in rows if len(names) == 1 else []:
        print(json.dumps(row, indent=1))


def _summary(way: str, tried: list[dict[str, Any]]) -> dict[str, Any]:
    answers = [row[way].removesuffix(_PARTS) for row in tried]
    found = Counter(answers)
    trained = sum(found[answer] for answer in (_TRAINS, _SAME, _AS_EAGER, _AS_TRACED, _ROUNDED))
    return {
        "compiled with": way,
        "train": trained,
        _SAME: found[_SAME] if way != "aot_eager" else "",
        f"{_AS_EAGER} (aot_eager's differ)": found[_AS_EAGER] if way != "aot_eager" else "",
        f"{_AS_TRACED} (both differ)": found[_AS_TRACED] if way != "aot_eager" else "",
        f"{_ROUNDED} (aot_eager fails)": found[_ROUNDED] if way != "aot_eager" else "",
        "in parts, after graph breaks": sum(row[way].endswith(_PARTS) for row in tried) if way != "aot_eager" else "",
        "fail or differ": len(tried) - trained,
    }


_COLUMNS = ("architecture", "aot_eager", *WAYS, "not tried")


def _in_a_process(name: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.architectures", "--one", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, env=environment)
    except subprocess.TimeoutExpired:
        return {"architecture": name, "not tried": f"took longer than {_PATIENCE} seconds"}
    lines = ran.stdout.splitlines()
    if ran.returncode or not lines:
        return {"architecture": name, "not tried": f"the process ended with {ran.returncode}"}
    return {"architecture": name, **json.loads(lines[-1])}


def one(name: str) -> dict[str, str]:
    """What became of one architecture, by way; or why it could not be tried."""
    task, architecture = name.split("/")
    try:
        model, config = small_model(task, architecture)
        batch = small_batch(task, config)
        eagerly = _step(model, model, batch)
        again, _ = small_model(task, architecture)
        if _different(_step(again, again, batch), eagerly):
            return {"not tried": "two eager steps with the same seed differ"}
    except Exception as error:
        return {"not tried": _text(error)}
    row: dict[str, str] = {}
    reference = None
    try:
        with dynamo_flags():
            reference = _step_of(name, lambda model: torch.compile(model, backend=_aot_eager), batch)
        row["aot_eager"] = _TRAINS
    except Exception as error:
        row["aot_eager"] = _text(error)
        with contextlib.suppress(Exception):  # what was traced may decide ties otherwise than eager
            eagerly = _traced_step(name, batch)
    traced: dict[str, torch.Tensor] | None = None
    for way, options in WAYS.items():
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                found = _step_of(name, lambda model, given=options: roundpipe_fx.compile(model, **given), batch)
            broke = any(isinstance(item.message, roundpipe_fx.GraphBreakWarning) for item in warned)
            answer = _compared(found, reference, eagerly)
            if reference is not None and answer not in (_SAME, _AS_EAGER):
                traced = traced or _traced_step(name, batch)
                answer = _AS_TRACED if _compared(found, traced, eagerly) == _SAME else answer
            row[way] = answer + (_PARTS if broke else "")
        except Exception as error:
            row[way] = _text(error)
    return row


def _traced_step(name: str, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A step of what Dynamo traces, run eagerly."""
    with dynamo_flags():
        return _step_of(name, lambda model: torch.compile(model, backend="eager"), batch)


def _step_of(name: str, compiled: Callable[[nn.Module], Any], batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    model, _ = small_model(*name.split("/"))
    return _step(compiled(model), model, batch)


def _aot_eager(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    keep_resolved_random_branches(module)
    return aot_eager(module, inputs)


def _step(run: Callable[..., Any], model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    loss = run(**batch).loss
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    buffers = {f"buffer {name}": value.clone() for name, value in model.named_buffers()}
    return {"loss": loss.detach(), **gradients, **buffers}


def _compared(
    found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor] | None, eagerly: dict[str, torch.Tensor]
) -> str:
    expected = eagerly if reference is None else reference
    if found.keys() != expected.keys():
        return f"other gradients: {', '.join(sorted(found.keys() ^ expected.keys()))}"
    different = _different(found, expected)
    if reference is not None:
        if different and found.keys() == eagerly.keys() and not _different(found, eagerly):
            return _AS_EAGER
        return f"{len(different)} of {len(expected)} tensors differ" if different else _SAME
    largest = max(value.abs().max().item() for name, value in expected.items() if name != "loss" and value.numel())
    worst = max([(found[name].double() - expected[name].double()).abs().max().item() for name in different], default=0)
    return _ROUNDED if worst <= _ROUNDING * max(largest, 1e-3) else f"differs from eager by {worst:.1e}"


def _different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        torch.set_num_threads(1)
        print(json.dumps(one(sys.argv[2])))
    else:
        main()
