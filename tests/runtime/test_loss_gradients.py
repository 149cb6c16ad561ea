"""The gradient of a negative log-likelihood as a comparison."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.runtime.loss_gradients import DECOMPOSITIONS

CLASSES = 7
aten = torch.ops.aten


@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 2)], ids=str)
def test_numbers_are_those_of_the_operator(shape: tuple[int, ...]) -> None:
    """Each reduction, with and without weights, ignored labels, negative ones among them, and only such."""
    torch.manual_seed(0)
    operator = aten.nll_loss2d_backward.default if len(shape) > 1 else aten.nll_loss_backward.default
    dim = min(len(shape), 1)
    scores = torch.randn(*shape[:1], CLASSES, *shape[1:], dtype=torch.float64).log_softmax(dim)
    for weighted, reduction, ignored, every in itertools.product((False, True), range(3), (-100, 2), (False, True)):
        labels = torch.randint(CLASSES, shape)
        labels = torch.where(torch.rand(shape) < (1.1 if every else 0.3), ignored, labels)
        weight = torch.rand(CLASSES, dtype=torch.float64) if weighted else None
        named = labels.clamp_min(0)
        counted = (labels != ignored) * (1 if weight is None else weight[named])
        gradient = torch.randn(shape if reduction == 0 else (), dtype=torch.float64)
        call = (gradient, scores, labels, weight, reduction, ignored, counted.sum().double())
        expected, found = operator(*call), DECOMPOSITIONS[operator](*call)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


class Head(nn.Module):
    def __init__(self, rows: int, words: int) -> None:
        super().__init__()
        self.hidden, self.head = nn.Parameter(torch.randn(rows, 8)), nn.Linear(8, words, bias=False)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.hidden), labels)


def test_no_ones_of_the_scores_size_are_made() -> None:
    """The log-softmax and the gradient of the scores: zeros into which ones are written would be a third."""
    torch._dynamo.reset()
    rows, words = 1024, 4096
    model, labels = Head(rows, words), torch.randint(words, (rows,))
    compiled = roundpipe_fx.compile(model, stage_compiler="inductor", stages=1)
    for _ in range(2):
        with roundpipe_fx.measure_peak("cpu") as peak:
            compiled(labels).backward()
    assert peak.bytes < 2.1 * 4 * rows * words, peak.bytes / (4 * rows * words)
