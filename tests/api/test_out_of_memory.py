"""Out-of-memory errors of steps say what was planned and what to change, before PyTorch's own text.

What is allocated on devices is in tests/gpu/test_out_of_memory.py.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from tests.pipeline.steps import CPUS, Blocks, batch_of, squares
from tests.remat.graphs import mlp

ORIGINAL = "CUDA out of memory. Tried to allocate 1.00 TiB."


class _Failing:
    """Numbers of runs of each phase that are still to run out of memory."""

    forward = 0
    backward = 0


@torch.library.custom_op("roundpipe_fx_tests::out_of_memory", mutates_args=())
def _failing(x: torch.Tensor) -> torch.Tensor:
    if _Failing.forward:
        _Failing.forward -= 1
        raise torch.OutOfMemoryError(ORIGINAL)
    return x.clone()


@torch.library.custom_op("roundpipe_fx_tests::out_of_memory_backward", mutates_args=())
def _failing_backward(x: torch.Tensor) -> torch.Tensor:
    if _Failing.backward:
        _Failing.backward -= 1
        raise torch.OutOfMemoryError(ORIGINAL)
    return x.clone()


for _operator in (_failing, _failing_backward):
    _operator.register_fake(torch.empty_like)
_failing.register_autograd(lambda ctx, gradient: _failing_backward(gradient))


@contextlib.contextmanager
def _running_out(**times: int) -> Iterator[pytest.ExceptionInfo[torch.OutOfMemoryError]]:
    for phase, count in times.items():
        setattr(_Failing, phase, count)
    try:
        with warnings.catch_warnings(), pytest.raises(torch.OutOfMemoryError, match=re.escape(ORIGINAL)) as caught:
            warnings.simplefilter("ignore")
            yield caught
    finally:
        _Failing.forward = _Failing.backward = 0
    assert type(caught.value) is torch.OutOfMemoryError and len(caught.value.args) == 1


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(depth=6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(_failing(x))


class _Chain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Blocks(depth=2), Blocks(depth=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](_failing(self[0](x)))


def _check(text: str, phase: str, plan: roundpipe_fx.Plan) -> str:
    """Check what every message has; returns what is to change."""
    explanation, original = text.split("\n\nPyTorch's error: ")
    assert original == ORIGINAL
    title, *lines = explanation.splitlines()
    assert title == f"out of memory in the {phase} of a model compiled by roundpipe_fx."
    assert re.match(rf"  budget: .* \({plan.budget} bytes\)", lines[0])
    assert lines[1].startswith("  plan: predicted peak ")
    advice = explanation.partition("To change one of these:\n")[2]
    assert "write_snapshot" in advice and "tiling='auto'" in advice
    (proposed,) = re.findall(r"memory_budget=(\d+),", advice)
    assert plan.budget is not None and int(proposed) < plan.budget
    return advice


def test_a_forward_that_fails_twice() -> None:
    compiled = roundpipe_fx.compile(_Model(), memory_budget=0.8)
    with _running_out(forward=2) as caught:
        compiled(torch.randn(512, 16))
    text = str(caught.value)
    _check(text, "forward", compiled.plan)
    assert "bytes), 80% of what was asked for\n" in text and len(compiled.plans) == 2
    peak = compiled.plan.peak
    assert f"in {peak.call} at {peak.value}" in text


def test_a_forward_that_fails_once_warns_with_the_original_text() -> None:
    compiled = roundpipe_fx.compile(_Model(), memory_budget=0.8)
    _Failing.forward = 1
    with pytest.warns(UserWarning, match=re.escape(f"the step ran out of memory ({ORIGINAL}). Replanning with 80%")):
        compiled(torch.randn(512, 16)).sum().backward()


def test_a_backward_is_not_repeated() -> None:
    compiled = roundpipe_fx.compile(_Model(), memory_budget=0.8)
    loss = compiled(torch.randn(512, 16, requires_grad=True)).sum()
    with _running_out(backward=1) as caught:
        loss.backward()
    _check(str(caught.value), "backward", compiled.plan)
    assert "80%" not in str(caught.value)
    compiled(torch.randn(512, 16, requires_grad=True)).sum().backward()


def test_where_no_smaller_budget_can_be_met_the_first_failure_is_told() -> None:
    model, x = _Model(), torch.randn(512, 16)
    compiled = roundpipe_fx.compile(model, memory_budget=0.0)
    with _running_out(forward=5) as caught:
        compiled(x)
    _check(str(caught.value), "forward", compiled.plan)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_behind_the_backend_of_torch_compile(phase: str) -> None:
    model = _Model()
    compiled = torch.compile(model, backend="roundpipe_fx", options={"memory_budget": 0.8})
    x = torch.randn(512, 16, requires_grad=True)
    with _running_out(**{phase: 1}) as caught:
        compiled(x).sum().backward()
    _check(str(caught.value), phase, roundpipe_fx.plans(model)[-1])


Run = Callable[[Any, torch.Tensor, torch.Tensor], None]

RUNS: dict[str, Run] = {
    "step": lambda compiled, x, y: compiled.forward_backward(x, labels=y, loss_fn=squares),
    "call": lambda compiled, x, y: squares(compiled(x), y).backward(),
}


@pytest.mark.parametrize(
    ("way", "times", "phase"),
    [
        ("step", {"forward": 10}, "step"),
        ("step", {"backward": 10}, "step"),
        ("call", {"forward": 10}, "forward"),
        ("call", {"backward": 10}, "backward"),
    ],
)
@pytest.mark.quick_every(2)
def test_in_a_pipeline(way: str, times: dict[str, int], phase: str) -> None:
    compiled = roundpipe_fx.compile(_Chain(), devices=CPUS, stages=2, num_microbatches=2, memory_budget=0.9)
    with _running_out(**times) as caught:
        RUNS[way](compiled, *batch_of(256))
    _check(str(caught.value), phase, compiled.plan)
    assert "; that of one microbatch alone in " in str(caught.value)


def test_without_a_budget() -> None:
    compiled = roundpipe_fx.compile(_Model(), recompute="full")
    with _running_out(forward=1) as caught:
        compiled(torch.randn(512, 16))
    text = str(caught.value)
    assert "\n  budget: none\n" in text and "memory_budget" not in text and text.endswith(ORIGINAL)


def test_inference() -> None:
    compiled = roundpipe_fx.compile(_Model(), memory_budget=0.8)
    with _running_out(forward=1) as caught, torch.no_grad():
        compiled(torch.randn(512, 16))
    assert str(caught.value).startswith("out of memory in the forward of")


def test_other_errors_stay_as_they_are() -> None:
    compiled = roundpipe_fx.compile(mlp(), memory_budget=0.8)
    loss = compiled(torch.randn(8, 16)).sum()
    loss.backward()
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert "roundpipe_fx" not in str(caught.value)
