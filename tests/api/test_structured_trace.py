"""Artifacts of the trace that ``TORCH_TRACE`` asks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import torch
import roundpipe_fx

for options in ({"memory_budget": 0.0}, {"num_microbatches": 2, "devices": ["cpu", "cpu"]}):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    compiled = roundpipe_fx.compile(model, **options)
    compiled(torch.ones(4, 4)).sum().backward()
"""


@pytest.mark.long
def test_plans_and_graphs_are_in_the_trace(tmp_path: Path) -> None:
    """On one device and in a pipeline."""
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path), "ROUNDPIPE_FX_PLAN_CACHE": "0"}
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, env=environment)
    (trace,) = tmp_path.glob("*.log")
    text = trace.read_text()
    names = re.findall(r'"artifact": {"name": "(roundpipe_fx_\w+)"', text)
    assert names == [f"roundpipe_fx_{name}" for name in ("captured_graph", "planned_graph", "plan")] * 2
    assert text.count("roundpipe_fx plan: ") == 2 and "def joint(" in text
