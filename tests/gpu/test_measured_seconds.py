"""Measured seconds of a pipeline's stages on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe_fx

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_plan_shows_the_step_with_the_measured_seconds_of_its_stages() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)).cuda()
    compiled = roundpipe_fx.compile(model, num_microbatches=2, schedule="gpipe", stage_compiler="eager", dynamic=False)
    for rows in (8, 512):
        compiled(torch.ones(rows, 256, device="cuda")).sum().backward()
        plan = compiled.plan
        seconds = plan.corrected_makespan()
        assert seconds is not None and seconds > 0
        assert f"({seconds * 1e3:.3f} ms with the stages' seconds in the latest step)" in str(plan)
        assert "seconds are modelled with the table of the " in str(plan)
