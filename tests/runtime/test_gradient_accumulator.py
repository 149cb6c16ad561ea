"""Gradients are added up where they are made, one at a time."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import roundpipe_fx
from roundpipe_fx.runtime.gradient_accumulator import GradientAccumulator
from tests.comparison import Step
from tests.golden_models import TiedTransformer
from tests.pipeline.steps import SCHEDULES, Blocks, assert_close, batch_of, left_behind, pipelined_step, squares


def test_what_is_somebody_elses_is_not_written_over() -> None:
    sums, first, second = GradientAccumulator(), torch.ones(2), torch.full((2,), 2.0)
    sums.add(0, first)
    sums.add(0, second)
    sums.add(0, second)
    assert sums.tensors[0].tolist() == [5, 5] and first.tolist() == [1, 1] and second.tolist() == [2, 2]
    mine = torch.ones(2)
    sums.add(1, mine, owned=True)
    sums.add(1, second)
    assert sums.tensors[1] is mine and mine.tolist() == [3, 3]
    sums.add(2, first)
    taken = sums.take(2)
    assert taken is not None and taken is not first and torch.equal(taken, first)
    assert sums.take(2) is None
    sums.give(2, taken)
    assert sums.take(2) is taken
    others = GradientAccumulator()
    sums.move(others, lambda tensor: tensor)
    assert not sums.tensors and others.tensors.keys() == {0, 1}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.quick_every(2)
def test_a_step_holds_no_matrix_beside_the_sums(schedule: str) -> None:
    model, (x, y) = Blocks(128, 6), batch_of(8, 128)
    compiled = roundpipe_fx.compile(model, devices=["cpu"], stages="auto", num_microbatches=4, schedule=schedule)
    for _ in range(2):
        compiled.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            compiled.forward_backward(x, labels=y, loss_fn=squares)
    gradients = sum(p.numel() * 4 for p in model.parameters())
    assert gradients < peak.bytes < gradients + 128 * 1024  # the rest are activations; a matrix has as many bytes


@functools.cache
def _tied() -> tuple[nn.Module, dict[str, torch.Tensor], Step]:
    """A model, which is only copied, its batch and the reference."""
    torch.manual_seed(0)
    model, tokens = TiedTransformer(width=8, depth=3, vocabulary=1024), torch.randint(1024, (4, 6))
    batch = {"tokens": tokens, "targets": tokens}
    reference, _ = pipelined_step(model, batch, num_microbatches=4, devices=["cpu"], stages=1)
    return model, batch, reference


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.quick_every(3)
def test_no_microbatch_sends_a_tied_gradient(schedule: str) -> None:
    model, batch, reference = _tied()
    step, compiled = pipelined_step(model, batch, num_microbatches=4, schedule=schedule)
    assert_close(step, reference)
    modules = compiled.plan.modules
    made = {node for module in modules for node in module.outputs}
    parts = 0
    for module in modules:
        for node in module.inputs:
            value = node.meta.get("val")
            if node in made and isinstance(value, torch.Tensor):
                assert value.shape != (1024, 8), f"{module.name} gets {node.name}"
        parts += sum(node.name.startswith("sum_") and "embedding" in node.name for node in _placeholders(module.module))
    assert parts == 2


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return module.graph.find_nodes(op="placeholder")


def test_a_stage_compiler_gets_an_ordinary_addition() -> None:
    seen: list[fx.GraphModule] = []

    def compiler(module: fx.GraphModule, examples: list[Any]) -> Any:
        assert len(_placeholders(module)) == len(examples)
        seen.append(module)
        return module

    model, (x, y) = Blocks(), batch_of(8)
    options: dict[str, Any] = {"labels": y, "loss_fn": squares, "num_microbatches": 4}
    reference, _ = pipelined_step(model, {"x": x}, **options)
    step, _ = pipelined_step(model, {"x": x}, stage_compiler=compiler, **options)
    assert_close(step, reference)
    targets = {node.target for module in seen for node in module.graph.nodes if node.op == "call_function"}
    assert seen and all(isinstance(target, torch._ops.OpOverload) for target in targets)


@pytest.mark.long
def test_inductor_adds_up() -> None:
    model, (x, y) = Blocks(dropout=0.5), batch_of(8)
    options: dict[str, Any] = {"labels": y, "loss_fn": squares, "num_microbatches": 4}
    reference, _ = pipelined_step(model, {"x": x}, **options)
    step, compiled = pipelined_step(model, {"x": x}, stage_compiler="inductor", **options)
    assert_close(step, reference)
    before = {name: p.grad.clone() for name, p in compiled.named_parameters() if p.grad is not None}
    torch.manual_seed(0)  # the step's own seed: the same masks once more
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    for name, parameter in compiled.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * before[name])


class Uses(nn.Module):
    """Layers that use a few parameters in all ways there are, drawn by a seed: some several times, some frozen."""

    WIDTH = 6

    def __init__(self, seed: int, depth: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        width = self.WIDTH
        self.matrices = nn.ParameterList(torch.randn(width, width) / 2 for _ in range(3))
        self.vectors = nn.ParameterList(torch.randn(width) for _ in range(2))
        self.halves = nn.ParameterList(torch.randn(width // 2, width) / 2 for _ in range(2))
        for parameter in self.parameters():
            parameter.requires_grad_(draw.random() < 0.85)
        self.matrices[0].requires_grad_(True)
        self.uses = [(draw.choice(_WAYS), draw.randrange(6)) for _ in range(depth)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for way, which in self.uses:
            matrix, vector = self.matrices[which % 3], self.vectors[which % 2]
            if way == "linear":
                x = x + torch.tanh(F.linear(x, matrix, vector))
            elif way == "product":
                x = torch.tanh(x @ matrix)
            elif way == "scaled":
                x = torch.sin(x * vector) + vector.sum()
            elif way == "joined":
                x = torch.tanh(x @ torch.cat(list(self.halves)))
            elif way == "both":
                x = torch.tanh(x + (self.vectors[0] + self.vectors[1]))
            else:
                x = torch.tanh(x @ (matrix @ self.matrices[0]) + matrix[0])
        return x + self.matrices[0][1]


_WAYS = ("linear", "linear", "product", "scaled", "joined", "both", "derived")


@pytest.mark.long
@given(
    seed=st.integers(0, 10**6),
    depth=st.integers(2, 7),
    microbatches=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(SCHEDULES),
    given_memory=st.sampled_from([{"checkpoint": "never"}, {"checkpoint": "always"}, {"memory_budget": 0.0}]),
    devices=st.integers(1, 3),
)
@settings(max_examples=12, deadline=None, derandomize=True)
@pytest.mark.filterwarnings("ignore:roundpipe_fx. stages=")
def test_however_parameters_are_used(
    seed: int, depth: int, microbatches: int, schedule: str, given_memory: dict[str, Any], devices: int
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model, (x, y) = Uses(seed, depth).double(), batch_of(8, Uses.WIDTH)
    x, y = x.double(), y.double()
    own = copy.deepcopy(model)
    loss = squares(own(x), y)
    loss.backward()
    reference = left_behind(own, loss)
    compiled = roundpipe_fx.compile(
        model,
        devices=["cpu"] * devices,
        num_microbatches=microbatches,
        loss_reduction="sum",
        schedule=schedule,
        **given_memory,
    )
    for _ in range(2):  # in the second step nothing is left of the first
        model.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
        assert_close(left_behind(model, loss), reference, 1e-9)
    assert compiled.plan.pipeline is not None
    assert peak.bytes <= sum(compiled.plan.pipeline.peak_bytes)
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    for name, parameter in model.named_parameters():
        before = reference.gradients[name]
        assert (parameter.grad is None) == (before is None)
        if before is not None:
            torch.testing.assert_close(parameter.grad, 2 * before)
