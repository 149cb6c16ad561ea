"""Models on the host: outputs leave the device when the forward is over, and are not made if nobody reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.runtime.unread_outputs import UnreadTensor
from tests.scoring_heads import WORDS, make_head

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]

_TOKENS, _WIDTH = 512, 64
_SCORES = 4 * WORDS * _TOKENS
_GRANULARITY = 2**21


class _Scores(nn.Module):
    """The loss is computed outside, from values that the backward reads or not."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, WORDS))
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.layers(x)
        return scores.sigmoid() if self.read else scores


def _made(capped: bool = False) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return make_head(_TOKENS, _WIDTH, capped)


def _peak(step: Callable[[], Any]) -> int:
    """Bytes that a step allocates beyond those that are there, in its third run."""
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _compiled(model: nn.Module, microbatches: int, **options: Any) -> Any:
    return roundpipe_fx.compile(
        model, devices=["cuda:0"], num_microbatches=microbatches, stage_compiler="eager", **options
    )


@pytest.mark.parametrize("budget", [0.0, 1.0])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", ["capped", "read", "unread"])
def test_outputs_are_planned_as_gone_when_the_backward_begins(name: str, microbatches: int, budget: float) -> None:
    """But for outputs that the backward reads. That the caller holds them costs nothing on the device."""
    head, x, y = _made(capped=True)
    held: list[Any] = []

    def step() -> None:
        held[:] = [model(x, y)] if name == "capped" else [(model(x).square().mean(),)]
        held[0][0].backward()

    model = _compiled(head if name == "capped" else _Scores(name == "read"), microbatches, memory_budget=budget)
    peak = _peak(step)
    assert peak <= model.plan.peak_bytes <= peak + _GRANULARITY + (_SCORES // 2 if microbatches > 1 else 0)
    assert model.plan.unread_bytes == 0


@pytest.mark.parametrize("microbatches", [1, 2])
def test_scores_that_nobody_reads_are_not_made(microbatches: int) -> None:
    model, *batch = _made()
    expected = copy.deepcopy(model)
    expected(*batch)[0].backward()
    compiled = _compiled(model, microbatches, memory_budget=0.0, outputs="unread")
    compiled(*batch)[0].backward()
    for first, second in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(second.grad, first.grad, rtol=1e-5, atol=1e-8)
    peak = _peak(lambda: compiled(*batch)[0].backward())
    assert peak <= compiled.plan.peak_bytes <= peak + _GRANULARITY


def test_the_least_budget_falls_by_the_scores() -> None:
    model, *batch = _made()
    least = []
    for outputs in ("held", "auto"):
        with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
            _compiled(model, 1, memory_budget=1, outputs=outputs)(*batch)
        least.append(refused.value.minimum)
    assert least[1] <= least[0] - _SCORES + 4 * _TOKENS * _WIDTH  # what scores are computed from stays
    compiled = _compiled(model, 1, memory_budget=least[1])
    peak = _peak(lambda: compiled(*batch)[0].backward())
    assert peak <= compiled.plan.peak_bytes <= least[1]
    assert compiled.plan.unread_bytes == _SCORES and len(compiled.plans) == 1


@pytest.mark.parametrize("microbatches", [1, 2])
def test_scores_that_are_read_are_on_the_host_and_right(microbatches: int) -> None:
    model, *batch = _made()
    expected = model(*batch)[1].detach()
    loss, scores = _compiled(model, microbatches, outputs="unread")(*batch)
    assert type(scores) is UnreadTensor and scores.device.type == "cpu" and scores.requires_grad
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6, check_device=True)
    loss.backward()
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
