"""Outputs that no loss reads cost no gradient, behind every front door and for sizes of any kind."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx

_WIDTH = 48


class WithOutputs(nn.Module):
    """Returns a loss, what it was computed from, and hidden states; some of them are views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, 8 * _WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        first = torch.tanh(self.first(x))
        second = torch.tanh(self.second(first))
        logits = self.head(second)
        loss = logits.square().mean()
        return {"loss": loss, "logits": logits, "hidden": (first, second), "halves": logits.chunk(2)}


class Broken(nn.Module):
    """Two graphs, the first of which returns a value that is not differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = torch.tanh(self.first(x))
        extra = wide.exp()
        torch._dynamo.graph_break()
        return self.head(wide).square().mean(), extra


def _compiled(model: nn.Module, **options: Any) -> nn.Module:
    dynamic = options.pop("dynamic")
    return roundpipe_fx.compile(model, dynamic=dynamic, **options)


def _in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(backend="roundpipe_fx", dynamic=options.pop("dynamic"), options=options)
    return model


def _by_torch(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="roundpipe_fx", dynamic=options.pop("dynamic"), options=options)


DOORS = [_compiled, _in_place, _by_torch]


def _loss(outputs: Any) -> torch.Tensor:
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.quick_every(2)
def test_a_budget_holds_with_outputs_beside_the_loss(door: Callable[..., Any], dynamic: bool) -> None:
    model = WithOutputs()
    reference = copy.deepcopy(model)
    least = roundpipe_fx.plan(model, torch.empty(40, _WIDTH, device="meta"), memory_budget=0.0).peak_bytes
    run = door(model, memory_budget=int(1.2 * least), dynamic=dynamic)
    for rows in (40, 36):
        x = torch.randn(rows, _WIDTH)
        for _ in range(2):
            model.zero_grad()
            with roundpipe_fx.measure_peak("cpu") as peak:
                outputs = run(x)
                _loss(outputs).backward()
            plan = roundpipe_fx.plans(run)[-1]
            assert peak.bytes <= plan.peak_bytes <= int(1.2 * least)
        reference.zero_grad()
        _loss(torch.compile(reference, backend="aot_eager")(x)).backward()
        for own, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(own.grad, theirs.grad)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("chosen", ["logits", "hidden", "halves"])
def test_any_output_may_be_differentiated_alone(chosen: str, dynamic: bool) -> None:
    model = WithOutputs()
    reference = copy.deepcopy(model)
    torch.manual_seed(0)
    gradients: list[list[Any]] = []
    for run in (roundpipe_fx.compile(model, memory_budget=0.0, dynamic=dynamic), reference):
        for rows in (40, 36):
            for parameter in run.parameters():
                parameter.grad = None
            x = torch.linspace(-1, 1, rows * _WIDTH).view(rows, _WIDTH)
            out = run(x)[chosen]
            (out if isinstance(out, torch.Tensor) else out[-1]).square().sum().backward()
            gradients.append([parameter.grad for parameter in run.parameters()])
    for own, theirs in zip(gradients[:2], gradients[2:], strict=True):
        for gradient, right in zip(own, theirs, strict=True):
            # Gradients of a graph are zeros where autograd's would be None.
            assert torch.allclose(gradient, torch.zeros_like(gradient) if right is None else right, atol=1e-6)


@pytest.mark.parametrize("dynamic", [False, True])
def test_graphs_between_breaks_get_no_zeros_either(dynamic: bool) -> None:
    model, x = Broken(), torch.randn(40, _WIDTH)
    compiled = roundpipe_fx.compile(model, memory_budget=0.0, dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            model.zero_grad()
            with roundpipe_fx.measure_peak("cpu") as peak:
                outputs = compiled(x)
                outputs[0].backward()
    assert peak.bytes <= compiled.plan.budget


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.long
def test_stages_that_need_strides_get_full_zeros(dynamic: bool) -> None:
    """Inductor's code reads memory by the strides that it was compiled for."""
    model = WithOutputs()
    reference = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(model, memory_budget=0.0, dynamic=dynamic, stage_compiler="inductor")
    for rows in (40, 24):
        x = torch.randn(rows, _WIDTH)
        for run in (compiled, reference):
            run.zero_grad()
            run(x)["loss"].backward()
        for own, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(own.grad, theirs.grad, atol=1e-6)


@pytest.mark.parametrize("door", DOORS[1:])
def test_in_place_a_gradient_that_the_plan_does_not_count_is_told_of_once(door: Callable[..., Any]) -> None:
    model, x = WithOutputs(), torch.randn(40, _WIDTH)
    run = door(model, memory_budget=0.0, dynamic=False)
    told: list[str] = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outputs = run(x)
            (outputs["loss"] + outputs["logits"].mean()).backward()
        told += [str(one.message) for one in caught if one.category is roundpipe_fx.StepBudgetWarning]
    (text,) = told
    size = 40 * 8 * _WIDTH * 4
    assert f"{size} bytes" in text and "gradient of an output beside the loss" in text
    assert f"memory_budget is {roundpipe_fx.plans(run)[-1].budget} bytes" in text
