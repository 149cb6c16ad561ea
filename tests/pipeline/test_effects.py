"""Effects (assertions of linear algebra): their tokens are inputs and outputs of the graph that have no gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from tests.capturing import capture_joint
from tests.comparison import aot_eager_step, assert_bitwise, train_step
from tests.pipeline.steps import CPUS, assert_close, pipelined_step


def _matrices(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(-1) * x.unsqueeze(-2) + 20 * torch.eye(x.shape[-1])


class _SolveInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.linalg.solve(_matrices(x), gradient)


class _Effects(nn.Module):
    """Effects in the forward and in the backward; a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tied(torch.linalg.inv(_matrices(self.first(x))).sum(-1)).tanh()
        y = _SolveInBackward.apply(self.tied(y))
        return self.last(torch.linalg.cholesky(_matrices(y)).sum(-1)).square().sum()


@pytest.mark.parametrize("schedule", ["zero_bubble", "roundpipe"])
def test_bits_with_effects(schedule: str) -> None:
    model, batch = _Effects(), {"x": torch.randn(3, 4)}
    reference = aot_eager_step(model, batch)
    step, _ = pipelined_step(model, batch, num_microbatches=1, schedule=schedule, checkpoint="always")
    assert_bitwise(step, reference)


@pytest.mark.parametrize("options", [{"schedule": "gpipe", "memory_budget": 0.0}, {"checkpoint": "except_last"}])
@pytest.mark.quick_every(2)
def test_microbatches_with_effects(options: dict[str, Any]) -> None:
    model, batch = _Effects(), {"x": torch.randn(4, 4)}
    reference = aot_eager_step(model, batch)
    step, _ = pipelined_step(model, batch, num_microbatches=3, **options)
    assert_close(step, reference)
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(own, devices=CPUS, num_microbatches=3, loss_reduction="sum", **options)
    assert_close(train_step(compiled, own, batch), reference)


def test_effects_within_a_budget_without_a_pipeline() -> None:
    model, batch = _Effects(), {"x": torch.randn(3, 4)}
    reference = aot_eager_step(model, batch)
    own = copy.deepcopy(model)
    assert_bitwise(train_step(roundpipe_fx.compile(own, memory_budget=0.0), own, batch), reference)


def test_an_offloaded_model_with_effects_is_planned() -> None:
    plan = roundpipe_fx.plan(_Effects(), torch.randn(4, 4), device="H100", offloaded=True)
    assert plan.peak_bytes > 0


def test_owners_and_labels_are_those_of_the_descriptions() -> None:
    model = _Effects()
    joint = capture_joint(model, torch.randn(3, 4))
    names = {id(node): name for node, name in joint.labels.items()}
    owned = {}
    for owner, gradient in zip(joint.gradient_owners, joint.gradients, strict=True):
        if owner is not None:
            owned[names[id(joint.primals[owner])]] = tuple(gradient.meta["val"].shape)
    assert owned == {name: tuple(p.shape) for name, p in model.named_parameters()}
    tokens = [node for node in joint.inputs if node.meta["val"].shape == (0,)]
    assert len(tokens) == 2  # the forward's and the backward's
    assert joint.gradients[-1] is not None
    assert joint.gradient_owners[-1] is None
    assert not joint.parameters & set(tokens)
