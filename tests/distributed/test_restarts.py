"""A rank is killed: torchrun starts all ranks anew, and training goes on from the last checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent


def _train(folder: Path, *arguments: str) -> list[str]:
    """Train in two processes; what each wrote when it had finished."""
    folder.mkdir()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    command = [sys.executable, *torchrun, "-m", "tests.distributed.resumable", str(folder), *arguments]
    # With a store that outlives the ranks, torch 2.13 may have those that start anew wait for addresses of ended ones.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return [(folder / f"finished_{rank}").read_text() for rank in range(2)]


@pytest.mark.long
def test_a_rank_is_killed(tmp_path: Path) -> None:
    """In the middle of the third step: the weights are bitwise equal to those of a run that was not interrupted."""
    assert _train(tmp_path / "through") == ["restarts 0, from step 0"] * 2
    assert _train(tmp_path / "killed", "2") == ["restarts 1, from step 2"] * 2
    for rank in range(2):
        through, resumed = (torch.load(tmp_path / name / f"weights_{rank}.pt") for name in ("through", "killed"))
        assert through.keys() == resumed.keys() and through
        assert all(torch.equal(value, resumed[name]) for name, value in through.items())
