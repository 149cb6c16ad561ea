from __future__ import annotations

import io
import sys
import time

import pytest

from roundpipe_fx.remat import progress as module
from roundpipe_fx.remat.progress import progress


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
