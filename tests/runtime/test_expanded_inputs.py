"""Gradients that no step is expected to pass, in compiled stages: one element, or what arrives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx

WORDS, WIDTH, ROWS = 4096, 32, 64


class Model(nn.Module):
    """Logits beside the loss, as language models return."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        return nn.functional.cross_entropy(logits, labels), logits


def batch(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, WIDTH), torch.randint(WORDS, (rows,))


def gradients(model: nn.Module, run: Any, given: tuple[torch.Tensor, torch.Tensor], logits: bool) -> list[torch.Tensor]:
    model.zero_grad()
    loss, scores = run(*given)
    (loss + scores.square().mean() if logits else loss).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("door", ["compile", "in place", "backend"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.long
def test_a_gradient_that_arrives_is_used(door: str, dynamic: bool) -> None:
    """Missing, arriving, and missing again, with one compiled function and other sizes."""
    torch.manual_seed(0)
    model = Model()
    own = copy.deepcopy(model)
    torch._dynamo.reset()
    options: dict[str, Any] = {"stage_compiler": "inductor", "memory_budget": 1.0}
    if door == "compile":
        run: Any = roundpipe_fx.compile(own, dynamic=dynamic, **options)
    elif door == "in place":
        own.compile(backend="roundpipe_fx", options=options, dynamic=dynamic)
        run = own
    else:
        run = torch.compile(own, backend="roundpipe_fx", options=options, dynamic=dynamic)
    for rows, logits in ((ROWS, False), (ROWS, True), (ROWS, False), (ROWS // 2, True), (ROWS // 2, False)):
        given = batch(rows)
        expected = gradients(model, model, given, logits)
        found = gradients(own, run, given, logits)
        for mine, its in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "roundpipe"])
@pytest.mark.long
def test_it_is_compiled_once_by_whichever_worker_needs_it_first(schedule: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model()
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(
        own, stage_compiler="inductor", devices=["cpu"] * 2, num_microbatches=4, schedule=schedule
    )
    for logits in (False, True, False):
        given = batch()
        for mine, its in zip(
            gradients(own, compiled, given, logits), gradients(model, model, given, logits), strict=True
        ):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_missing_gradients_take_one_element() -> None:
    """Logits, which the caller holds, their log-softmax and gradient; zeros for the logits would be a fourth."""
    torch._dynamo.reset()
    model, given = Model(), batch(rows=1024)
    compiled = roundpipe_fx.compile(model, stage_compiler="inductor", stages=1)
    for _ in range(2):
        model.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            loss, logits = compiled(*given)
            loss.backward()
    assert peak.bytes < 3.1 * logits.nbytes, peak.bytes / logits.nbytes
