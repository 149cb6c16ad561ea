"""``compile(DistributedDataParallel(model))``: one graph, and all that DDP does around its module."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import roundpipe_fx
from tests.processes import Check, in_two_processes


class Net(nn.Module):
    """Has a buffer that each step updates, an output that no loss reads, and a layer that nothing reads.

    Attributes:
        failing: whether its forward raises.
    """

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.beside = nn.Linear(width, width)
        self.never = nn.Linear(width, width)
        self.register_buffer("sums", torch.zeros(width))
        self.failing = False

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.failing:
            raise ArithmeticError("the model's own error")
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.sums.add_(x.detach().mean(0))
        return {"out": x + self.sums, "beside": self.beside(x)}


SETTINGS: list[dict[str, Any]] = [
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.002},
    {"static_graph": True},
]


def _reference(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    """The same run without roundpipe_fx; ``aot_eager`` also gives zeros, not ``None``, to what no loss reads."""
    model.compile(backend="aot_eager")
    return DistributedDataParallel(model, **settings)


def _compiled(model: nn.Module, **settings: Any) -> Any:
    parallel = DistributedDataParallel(model, **settings)
    return roundpipe_fx.compile(parallel, memory_budget=0.5, stages=["module.layers.2"], fullgraph=True)


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def _step(parallel: DistributedDataParallel, rank: int, step: int, synchronized: bool = True) -> None:
    with contextlib.nullcontext() if synchronized else parallel.no_sync():
        parallel(_batch(rank, step))["out"].square().sum().backward()


def _state(model: nn.Module) -> dict[str, torch.Tensor | None]:
    gradients = {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    return {**model.state_dict(), **gradients}


def _assert_same(one: nn.Module, other: nn.Module) -> None:
    found, expected = _state(one), _state(other)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        wanted = expected[name]
        assert (value is None) == (wanted is None), name
        assert value is None or wanted is None or torch.equal(value, wanted), name


def check_training(rank: int, _folder: str) -> None:
    """Parameters, buffers and gradients are those of DDP, also where gradients are accumulated over steps."""
    for settings in SETTINGS:
        torch.manual_seed(rank)  # DDP makes the parameters of the processes equal
        model = Net()
        both = [_reference(copy.deepcopy(model), **settings), _compiled(model, **settings)]
        reference, compiled = both
        optimizers = [torch.optim.SGD(own.parameters(), lr=0.1) for own in both]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            if "static_graph" not in settings and step % 2:
                for own in both:
                    _step(own, rank, 10 + step, synchronized=False)
                _assert_same(compiled, reference)
            for own in both:
                _step(own, rank, step)
            _assert_same(compiled, reference)
            for optimizer in optimizers:
                optimizer.step()
        (plan,) = compiled.plans
        assert plan.stages[1].modules.startswith("module.layers.2")
        with torch.no_grad():
            outputs = [own.eval()(_batch(rank, 0)) for own in both]
        assert torch.equal(outputs[0]["out"], outputs[1]["out"])
        _assert_same(compiled, reference)


def check_errors(rank: int, _folder: str) -> None:
    """What the model raises in one process reaches the caller as it is, and the next step is that of DDP."""
    torch.manual_seed(0)
    model = Net()
    model.beside.requires_grad_(False)
    both = [DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)]
    both.append(_compiled(model, find_unused_parameters=True))
    for step in range(4):
        for own in both:
            own.zero_grad()
            if step % 2 == 0:
                own.module.failing = True
                with pytest.raises(ArithmeticError, match=r"^the model's own error$"):
                    _step(own, rank, step)
                own.module.failing = False
            _step(own, rank, step)
        _assert_same(both[1], both[0])


class _WithForward(DistributedDataParallel):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(2 * x)


def check_forward_of_a_subclass(rank: int, _folder: str) -> None:
    """A subclass with a forward of its own runs it; there the graph breaks in DDP's code, and the user is told."""
    torch.manual_seed(0)
    model = Net()
    model.beside.requires_grad_(False)
    both = [_WithForward(own, find_unused_parameters=True) for own in (copy.deepcopy(model), model)]
    both[1] = roundpipe_fx.compile(both[1], memory_budget=0.5)
    with pytest.warns(roundpipe_fx.GraphBreakWarning, match="in _pre_forward"):
        for own in both:
            _step(own, rank, 0)
    _assert_same(both[1], both[0])


def check_budget(rank: int, _folder: str) -> None:
    """What is measured is the plan of the whole step."""
    torch.manual_seed(rank)
    model = Net(width=64, depth=6)
    buckets = sum(parameter.nbytes for parameter in model.parameters())
    compiled = _compiled(model, bucket_cap_mb=0.04, find_unused_parameters=True)
    x = torch.randn(1024, 64)
    for _ in range(3):
        compiled.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            compiled(x)["out"].square().sum().backward()
        (plan,) = compiled.plans
        assert plan.recompute_seconds > 0 and peak.bytes <= plan.budget  # unused parameters: buckets stay as they are
        assert plan.bucket_bytes == buckets


@pytest.mark.long
@pytest.mark.parametrize(
    "checks",
    [[check_training], [check_errors, check_forward_of_a_subclass, check_budget]],
    ids=["training", "errors and budgets"],
)
def test_two_processes(checks: list[Check], tmp_path: Path) -> None:
    in_two_processes(checks, tmp_path)
