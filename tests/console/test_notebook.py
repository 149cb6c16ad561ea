"""In a notebook: progress as text where widgets are missing, and lines by the cell that they are in."""

from __future__ import annotations

import io
import linecache
import os
import subprocess
import sys
import time
import types

import pytest
import torch
from tqdm.std import tqdm

import roundpipe_fx
from roundpipe_fx.console import progress as module
from roundpipe_fx.console.progress import cell_of, is_notebook, progress, working

CELL = "/tmp/ipykernel_7/300918654.py"


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """As IPython's kernel has it."""

    def format_code_name(name: str) -> tuple[str, str] | None:
        return ("Cell", "In[3]") if name == CELL else None

    found = types.SimpleNamespace(kernel=None, compile=types.SimpleNamespace(format_code_name=format_code_name))
    ipython = types.ModuleType("IPython")
    monkeypatch.setattr(ipython, "get_ipython", lambda: found, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return found


def test_ipython_in_a_terminal_is_none(shell: types.SimpleNamespace) -> None:
    assert is_notebook()
    del shell.kernel
    assert not is_notebook() and cell_of(CELL) == "In[3]"
    del shell.compile
    assert cell_of(CELL) == ""


def test_progress_is_shown_although_the_output_is_no_terminal(
    shell: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DELAY", 0.05)
    monkeypatch.setattr(module, "tqdm", tqdm)
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    for _ in progress(range(4), "slow"):
        time.sleep(0.15)
    with working("something"):
        time.sleep(0.3)
    assert "roundpipe_fx: slow" in screen.getvalue() and "roundpipe_fx: something, 00:00" in screen.getvalue()


def test_text_stays_in_one_line(shell: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DELAY", 0.05)
    monkeypatch.setattr(module, "tqdm", tqdm)
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with working("all of it"):
        for _ in progress(range(3), "a part"):
            time.sleep(0.15)
    for _ in tqdm(range(2), "the user's", file=screen, mininterval=0):
        for _ in progress(range(3), "a part"):
            time.sleep(0.1)
    told = screen.getvalue()
    assert "all of it, 00:00" in told and "the user's" in told and "a part" not in told
    assert "\x1b" not in told and "\n" not in told.rstrip("\n")


def test_lines_are_those_of_cells(shell: types.SimpleNamespace) -> None:
    text = "import torch\ndef forward(self, x):\n    return (torch.tanh(x) * 2).sin()\n"
    linecache.cache[CELL] = (len(text), None, text.splitlines(keepends=True), CELL)
    names: dict[str, object] = {}
    exec(compile(text, CELL, "exec"), names)
    model = type("Model", (torch.nn.Module,), {"forward": names["forward"]})()
    plan = roundpipe_fx.compile(model, memory_budget=1.0).trace(torch.randn(4, requires_grad=True))
    step = plan.look_into().step
    assert step is not None and step.memory.moments[0].line == "In[3]:3"
    assert step.memory.source == {"In[3]:3": "return (torch.tanh(x) * 2).sin()"}


@pytest.mark.long
def test_torch_logs_prints_plans() -> None:
    program = (
        "import torch, roundpipe_fx; m = roundpipe_fx.compile(torch.nn.Linear(4, 4), memory_budget=1.0);"
        "m.trace(torch.randn(2, 4))"
    )
    environment = {**os.environ, "TORCH_LOGS": "roundpipe_fx"}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "roundpipe_fx plan: 1 stage of 1 segment" in told.stderr
