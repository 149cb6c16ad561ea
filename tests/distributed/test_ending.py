"""Threads of a model's groups end while the interpreter runs, whatever a rank's script does at its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.long
def test_a_rank_ends() -> None:
    command = [sys.executable, "-m", "tests.distributed.ending"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    error, *lines = done.stdout.splitlines()
    assert "were destroyed by destroy_process_group()" in error
    ends = [("destroys", 0), ("ends", 0), ("raises", 1), ("exits", 3)]
    expected = [line for way, code in ends for line in (f"{way} of the script", str(code))]
    assert lines == expected, done.stderr[-3000:]
    assert "ValueError: as it should" in done.stderr
