from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest
import torch

import roundpipe_fx
from roundpipe_fx.console import progress as module
from roundpipe_fx.console.progress import progress, working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_on_a_terminal_once_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DELAY", 0.05)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert list(progress(range(3), "quick")) == [0, 1, 2]
    assert "quick" not in screen.getvalue()
    for _ in progress(range(4), "slow"):
        time.sleep(0.15)
    assert "roundpipe_fx: slow" in screen.getvalue()


def test_there_is_none_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DELAY", 0.0)
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    assert list(progress(iter("abc"), "letters", 3)) == ["a", "b", "c"]
    assert not screen.getvalue()


def test_work_without_parts_is_told_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DELAY", 0.05)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    threads = threading.active_count()
    with working("something quick"):
        pass
    assert "quick" not in screen.getvalue()
    with pytest.raises(ValueError, match="broken"), working("something slow"):
        time.sleep(0.3)
        raise ValueError("broken")
    assert "roundpipe_fx: something slow, 00:00" in screen.getvalue()
    assert threading.active_count() == threads


def test_a_first_step_is_told_and_later_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DELAY", 0.0)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    model = roundpipe_fx.compile(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh()), memory_budget=0.5)
    x = torch.randn(2, 4)
    model(x).sum().backward()
    told = screen.getvalue()
    assert "the first step is traced" in told and "tracing operations" in told
    model(x).sum().backward()
    assert screen.getvalue() == told


_TOLD = """
import sys, time
import torch
import roundpipe_fx
from roundpipe_fx.console import progress

progress._DELAY = 0.05
model = roundpipe_fx.compile(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh()), memory_budget=0.5)
model(torch.randn(2, 4)).sum().backward()
with progress.working("something slow"):
    time.sleep(0.7)
print("over", file=sys.stderr)
"""


def _on_terminal(columns: int) -> str:
    """What a program writes to a terminal."""
    program, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    run = subprocess.Popen([sys.executable, "-c", _TOLD], stdout=terminal, stderr=terminal, stdin=terminal)
    os.close(terminal)
    written = b""
    with contextlib.suppress(OSError):  # the terminal's end
        while more := os.read(program, 1 << 16):
            written += more
    os.close(program)
    assert run.wait() == 0
    return written.decode()


@pytest.mark.long
@pytest.mark.parametrize("columns", [80, 0])  # some terminals do not say how wide they are
def test_a_real_terminal_is_told_and_clean_at_the_end(columns: int) -> None:
    written = _on_terminal(columns)
    for told in ("the first step is traced, planned and run", "tracing operations", "something slow, 00:00"):
        assert f"roundpipe_fx: {told}" in written
    before, over, _ = written.partition("over\r\n")
    assert over
    lines: list[str] = [""]  # as the terminal shows them: "\r" goes to a line's beginning, "\x1b[A" up
    row = 0
    for part in re.findall(r"\x1b\[A|\r|\n|[^\x1b\r\n]+", before):
        if part == "\x1b[A":
            row -= 1
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part != "\r":
            lines[row] = part + lines[row][len(part) :]
    assert not "".join(lines).strip(), lines


@pytest.mark.long
def test_a_log_is_told_nothing() -> None:
    run = subprocess.run([sys.executable, "-c", _TOLD], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("", "over\n")
