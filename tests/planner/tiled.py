"""Steps at budgets that only tiles meet, held against the step that is not compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.codegen.loop_text import list_loops

__all__ = ["Outcome", "assert_close", "assert_no_worse", "budgets", "check", "is_tiled", "minimum", "step"]

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Norm of a difference relative to the largest gradient's norm."""

Backward = Callable[[Any], torch.Tensor | None]


def backward_of(output: Any) -> torch.Tensor | None:
    """What a user does with what a model returns; the loss."""
    loss = output if isinstance(output, torch.Tensor) else output["loss"]
    loss.backward()
    return loss.detach().clone()


@dataclass(frozen=True)
class Step:
    """What a step left behind."""

    loss: torch.Tensor | None
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    state: torch.Tensor


def step(
    run: Callable[..., Any], model: nn.Module, batch: Mapping[str, Any], backward: Backward = backward_of, seed: int = 0
) -> Step:
    """One step of ``run``, whose parameters are those of ``model``; gradients of inputs count too."""
    model.zero_grad()
    given = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    for value in given.values():
        value.grad = None
    torch.manual_seed(seed)
    loss = backward(run(**batch))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    gradients |= {f"input {name}": value.grad for name, value in given.items() if value.requires_grad}
    return Step(
        loss,
        {name: None if gradient is None else gradient.clone() for name, gradient in gradients.items()},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        torch.get_rng_state(),
    )


def assert_close(found: Step, expected: Step, tolerance: float) -> None:
    """Loss and gradients within rounding; random numbers and integers the same."""
    assert torch.equal(found.state, expected.state), "other random numbers were drawn"
    largest = max((g.double().norm() for g in expected.gradients.values() if g is not None), default=torch.tensor(0.0))
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        own = found.gradients[name]
        assert (own is None) == (gradient is None), name
        if own is not None and gradient is not None:
            assert own.dtype == gradient.dtype and own.shape == gradient.shape
            _same_nan(own, gradient, name)
            difference = (own.double() - gradient.double()).nan_to_num().norm() / largest.nan_to_num().clamp_min(1e-30)
            assert difference <= tolerance, f"gradient of {name}: {float(difference)}"
    if expected.loss is not None:
        assert found.loss is not None and found.loss.dtype == expected.loss.dtype
        assert found.loss.shape == expected.loss.shape
        _same_nan(found.loss, expected.loss, "loss")
        difference = (found.loss.double() - expected.loss.double()).nan_to_num().norm()
        assert difference <= tolerance * expected.loss.double().norm().nan_to_num(), f"loss: {float(difference)}"
    for name, buffer in expected.buffers.items():
        if buffer.is_floating_point():
            assert torch.allclose(found.buffers[name], buffer, rtol=10 * tolerance, atol=10 * tolerance), name
        else:
            assert torch.equal(found.buffers[name], buffer), name


def _same_nan(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    assert torch.equal(found.isfinite(), expected.isfinite()), f"{name} is not finite where it should be, or is"


def is_tiled(compiled: roundpipe_fx.CompiledModule) -> bool:
    """Whether a loop is in what was emitted."""
    return any(list_loops(module.module.graph) for module in compiled.plan.modules)


def minimum(model: nn.Module, batch: Mapping[str, Any], backward: Backward = backward_of, **options: Any) -> int:
    """The least budget that an error states."""
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=1, **options)
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        compiled(**batch)
    return refused.value.minimum


@dataclass(frozen=True)
class Outcome:
    """A step at a budget.

    Attributes:
        budget: asked, in bytes.
        planned: the plan's peak.
        measured: the step's.
        tiled: whether there are loops.
    """

    budget: int
    planned: int
    measured: int
    tiled: bool


def budgets(model: nn.Module, batch: Mapping[str, Any], **options: Any) -> tuple[int, int, list[int]]:
    """The least budgets with and without tiles, and some from just below this to that."""
    with_tiles = minimum(model, batch, **options)
    without = minimum(model, batch, **{**options, "tiling": "never"})
    assert with_tiles <= without
    between = [without - 1, (with_tiles + without) // 2, with_tiles] if with_tiles < without else [with_tiles]
    return with_tiles, without, sorted({budget for budget in between if budget >= with_tiles}, reverse=True)


def assert_no_worse(found: list[torch.Tensor], plain: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    """Rounding is as without tiles: errors against exact gradients are at most half as large again."""
    largest = max(g.norm() for g in exact)
    for own, other, true in zip(found, plain, exact, strict=True):
        error, allowed = (own.double() - true).norm(), (other.double() - true).norm()
        assert error <= 1.5 * allowed + 1e-6 * largest, f"{float(error)}, without tiles {float(allowed)}"


def check(
    model: nn.Module,
    batch: Mapping[str, Any],
    backward: Backward = backward_of,
    *,
    tolerance: float | None = None,
    asked: Sequence[int] | None = None,
    tiles: bool = True,
    seed: int = 0,
    **options: Any,
) -> list[Outcome]:
    """Steps at decreasing budgets down to the least: gradients, loss, buffers, random numbers, peaks.

    Args:
        model: its class' ``forward`` takes the batch by name.
        batch: inputs by name.
        backward: what is done with what it returns.
        tolerance: of norms; ``None``: as the parameters' dtype asks.
        asked: budgets; ``None``: some between the least without tiles and the least with them.
        tiles: whether tiles are expected.
        seed: of random numbers.
        options: of the compilation.
    """
    dtype = next((p.dtype for p in model.parameters()), torch.float64)
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    plain = copy.deepcopy(model)
    expected = [step(plain, plain, batch, backward, seed + number) for number in range(2)]
    asked = asked or budgets(model, batch, **options)[2]
    found = []
    for budget in asked:
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        compiled = roundpipe_fx.compile(own, memory_budget=budget, **options)
        assert_close(step(compiled, own, batch, backward, seed), expected[0], tolerance)
        own.zero_grad()
        for value in batch.values():
            if isinstance(value, torch.Tensor):
                value.grad = None
        torch.manual_seed(seed + 1)
        with roundpipe_fx.measure_peak("cpu") as peak:
            backward(compiled(**batch))
        planned = compiled.plan.peak_bytes
        assert planned <= budget
        assert peak.bytes <= budget, f"{peak.bytes} bytes live, the budget is {budget}, planned {planned}"
        again = copy.deepcopy(expected[1])
        left = {name: p.grad for name, p in own.named_parameters()}
        left |= {
            f"input {name}": value.grad
            for name, value in batch.items()
            if isinstance(value, torch.Tensor) and value.requires_grad
        }
        assert_close(Step(again.loss, left, dict(own.named_buffers()), torch.get_rng_state()), again, tolerance)
        found.append(Outcome(budget, planned, peak.bytes, is_tiled(compiled)))
    measured = [outcome.measured for outcome in found]
    assert measured == sorted(measured, reverse=True), f"a smaller budget has a larger peak: {found}"
    if tiles:
        assert found[-1].tiled, found
    return found
