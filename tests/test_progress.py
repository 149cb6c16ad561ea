from __future__ import annotations

import io
import sys
import threading
import time

import pytest
import torch

import roundpipe_fx
from roundpipe_fx import progress as module
from roundpipe_fx.progress import progress, working


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
