"""Values that die in a compiled backward, and others that do not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.runtime import compiled_memory
from roundpipe_fx.torch_private import inductor_code, is_sole_reference

ROWS, WORDS = 256, 2048
BYTES = 4 * ROWS * WORDS


class Head(nn.Module):
    """Returns its scores beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head = nn.Parameter(torch.randn(ROWS, 8)), nn.Linear(8, WORDS, bias=False)

    def forward(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(self.hidden)
        return nn.functional.cross_entropy(scores, labels), scores


LABELS = torch.arange(ROWS) * 7 % WORDS


def _gradients(run: Callable[..., Any], model: nn.Module, **options: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss, scores = run(LABELS)
    del scores
    loss.backward(**options)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_a_tensor_is_alone_or_not() -> None:
    values = [torch.ones(4)]
    assert is_sole_reference(values, 0)
    view = values[0][1:]
    assert not is_sole_reference(values, 0)
    del view
    named = values[0]
    assert not is_sole_reference(values, 0)
    del named
    array = values[0].numpy()
    assert not is_sole_reference(values, 0)
    del array
    detached = values[0].detach()
    assert not is_sole_reference(values, 0)
    del detached
    assert is_sole_reference(values, 0)


def test_the_gradient_of_dropped_scores_is_written_over_them() -> None:
    torch._dynamo.reset()
    model = Head()
    compiled = roundpipe_fx.compile(model, stage_compiler="inductor")
    for _ in range(2):
        with roundpipe_fx.measure_peak("cpu") as peak:
            _gradients(compiled, model)
    assert peak.bytes < 1.5 * BYTES, peak.bytes / BYTES


@pytest.mark.parametrize(("recompute", "made"), [("none", 0), ("full", 1)])
def test_a_heads_backward_allocates_scores_once(recompute: str, made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only scores that are computed again: their gradient is written over them, and no zeros of their size are made."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiled_memory, "_known", {})
    monkeypatch.setenv("ROUNDPIPE_FX_PLAN_CACHE", "0")
    written: list[tuple[str, str]] = []

    def write(module: torch.fx.GraphModule, *how: Any) -> str:
        code = inductor_code(module, *how)
        written.append((module._get_name(), code))
        return code

    monkeypatch.setattr(compiled_memory, "inductor_code", write)
    compiled = roundpipe_fx.compile(Head(), recompute=recompute, stage_compiler="inductor", outputs="dropped")
    compiled.trace(LABELS)
    code = [text for name, text in written if "backward" in name][-1]
    allocated = re.findall(r"= empty_strided_cpu\(\((.*?)\), ", code)
    of_scores = [shape for shape in allocated if math.prod(map(int, filter(None, shape.split(", ")))) == ROWS * WORDS]
    assert len(of_scores) == made, allocated
    assert "zero" not in code and "full" not in code


@pytest.mark.parametrize("way", ["scores", "view", "array", "detached"])
def test_what_the_caller_holds_keeps_its_values(way: str) -> None:
    """In steps before and after one in which the scores are dropped."""
    torch._dynamo.reset()
    model = Head()
    expected = _gradients(model, model)
    compiled = roundpipe_fx.compile(model, stage_compiler="inductor")
    held: Any
    for drops in (False, True, False):
        model.zero_grad()
        loss, scores = compiled(LABELS)
        before = scores.detach().clone()
        if way == "view":
            held = scores[1:]
            before = before[1:]
        elif way == "array":
            held = scores.detach().numpy()
        else:
            held = scores if way == "scores" else scores.detach()
        del scores
        if drops:
            held = before
        loss.backward()
        torch.testing.assert_close(torch.as_tensor(held).detach(), before, rtol=0, atol=0)
        found = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(found, expected)


def test_a_retained_graph_is_differentiated_again() -> None:
    torch._dynamo.reset()
    model = Head()
    expected = _gradients(model, model)
    compiled = roundpipe_fx.compile(model, stage_compiler="inductor")
    loss, scores = compiled(LABELS)
    del scores
    for times in (1, 2, 3):
        model.zero_grad()
        loss.backward(retain_graph=times < 3)
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_code_that_writes_over_inputs_is_not_taken_for_other_code() -> None:
    """Inductor's cache is warm with the one when the other is compiled."""
    model = Head()
    expected = _gradients(model, model)
    for drops in (False, True, False):
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(model, stage_compiler="inductor")
        model.zero_grad()
        loss, scores = compiled(LABELS)
        before = scores.detach().clone()
        if drops:
            scores = before
        loss.backward()
        torch.testing.assert_close(scores, before, rtol=0, atol=0)
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
