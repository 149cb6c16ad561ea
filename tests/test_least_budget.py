"""The least budget is one number whatever was asked for, and it can be met."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx

Make = Callable[[], nn.Module]


class Norms(nn.Sequential):
    """Programs that need more than the planner's simulation says."""

    def __init__(self) -> None:
        def norm(channels: int) -> nn.Module:
            return nn.InstanceNorm2d(channels, affine=True, track_running_stats=True)

        super().__init__(
            *(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(inplace=True)),
            *(nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2), norm(16), nn.SiLU(inplace=True)),
            *(nn.ConvTranspose2d(16, 8, 4, 2, 1), norm(8), nn.LeakyReLU(0.1, True), nn.Dropout2d(0.2)),
            *(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(72, 5)),
        )


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with roundpipe_fx.memory_budget(0.5):
            x = self.layers[0](x)
        x = roundpipe_fx.checkpoint(self.layers[1], x)
        return F.dropout(self.layers[3](self.layers[2](x)), 0.1)


def _batch_norm() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(3)))


def _layer_norm() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(4)))


CASES: dict[str, tuple[Make, torch.Tensor, dict[str, Any]]] = {
    "norms": (Norms, torch.randn(3, 3, 12, 12), {}),
    "regions": (Regions, torch.randn(64, 16), {}),
    "dynamic": (_batch_norm, torch.randn(64, 16), {"dynamic": True}),
    "pipelined": (_layer_norm, torch.randn(64, 16), {"num_microbatches": 4, "devices": ["cpu", "cpu"]}),
}


def _refused(compiled: nn.Module, x: torch.Tensor) -> roundpipe_fx.InfeasibleBudgetError:
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        compiled(x)
    return refused.value


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_one_minimum(case: str) -> None:
    make, x, options = CASES[case]
    base = make()

    def compiled(budget: int) -> roundpipe_fx.CompiledModule:
        torch._dynamo.reset()
        return roundpipe_fx.compile(copy.deepcopy(base), memory_budget=budget, **options)

    refusals = [_refused(compiled(asked), x) for asked in (1, 17, 1000)]
    minimum = refusals[0].minimum
    assert [refused.minimum for refused in refusals] == [minimum] * 3
    assert "written 1.0" in str(refusals[0]) and "written 1.0" not in str(refusals[1])
    assert _refused(compiled(minimum - 1), x).minimum == minimum
    least = compiled(minimum)
    for _ in range(2):
        least.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            least(x).square().mean().backward()
    assert peak.bytes <= minimum * max(len(options.get("devices", [])), 1)
    assert least.plan.peak_bytes <= least.plan.budget == minimum


def test_a_pipelined_plan_says_the_steps_peak() -> None:
    compiled = roundpipe_fx.compile(_layer_norm(), devices=["cpu"], num_microbatches=4, memory_budget=1.0)
    x = torch.randn(64, 16)
    for _ in range(2):
        compiled.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            compiled(x).square().mean().backward()
    plan = compiled.plan
    assert plan.pipeline is not None and plan.peak.bytes < peak.bytes <= plan.peak_bytes == plan.pipeline.peak_bytes[0]
    assert f"of one microbatch alone, predicted peak: {plan.peak.bytes / 1024:.1f} KiB" in str(plan)
    assert roundpipe_fx.Plan.from_json(plan.to_json()).peak_bytes == plan.peak_bytes
