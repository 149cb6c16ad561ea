"""Training steps to compare: loss, gradients and buffers, bit for bit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch import fx, nn
from torch._dynamo.backends.debugging import aot_eager

import roundpipe_fx
from roundpipe_fx.ir.resolved_branches import keep_resolved_random_branches
from roundpipe_fx.torch_private import dynamo_flags


@dataclass(frozen=True)
class Step:
    """What one training step left behind."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    return output.loss


def train_step(
    run: Callable[..., Any], model: nn.Module, batch: Mapping[str, Any], seed: int = 0, autocast: bool = False
) -> Step:
    """One forward and backward of ``run``, whose parameters are those of ``model``."""
    model.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        loss = loss_of(run(**batch))
    loss.backward()
    return Step(
        loss.detach().clone(),
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
    )


def eager_step(model: nn.Module, batch: Mapping[str, Any], seed: int = 0, autocast: bool = False) -> Step:
    """The same step by eager PyTorch, on a copy of the model."""
    model = copy.deepcopy(model)
    return train_step(model, model, batch, seed, autocast)


def aot_eager_step(model: nn.Module, batch: Mapping[str, Any], seed: int = 0, autocast: bool = False) -> Step:
    """The reference: ``torch.compile(backend="aot_eager")`` on a copy of the model.

    Its backward is traced without autocast, as eager PyTorch runs one that is called outside of the region.
    """
    model = copy.deepcopy(model)
    with dynamo_flags(), torch._functorch.config.patch(backward_pass_autocast="off"):
        return train_step(torch.compile(model, backend=_aot_eager), model, batch, seed, autocast)


def _aot_eager(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    keep_resolved_random_branches(module)
    return aot_eager(module, inputs)


def compiled_step(
    model: nn.Module, batch: Mapping[str, Any], seed: int = 0, autocast: bool = False, **options: Any
) -> tuple[Step, roundpipe_fx.CompiledModule]:
    """The same step compiled by roundpipe_fx, on a copy of the model."""
    model = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(model, fullgraph=True, **options)
    return train_step(compiled, model, batch, seed, autocast), compiled


def assert_bitwise(step: Step, reference: Step) -> None:
    """Loss, every gradient and every buffer have the same bits (and gradients are there and finite)."""
    assert torch.equal(step.loss, reference.loss), f"loss {step.loss} is not {reference.loss}"
    assert torch.isfinite(reference.loss)
    _assert_same(step.gradients, reference.gradients)
    _assert_same(step.buffers, reference.buffers)
    assert any(gradient is not None and gradient.any() for gradient in reference.gradients.values())


def _assert_same(values: Mapping[str, torch.Tensor | None], references: Mapping[str, torch.Tensor | None]) -> None:
    assert values.keys() == references.keys()
    for name, value in values.items():
        expected = references[name]
        if value is None or expected is None:
            assert value is None and expected is None, name
        else:
            difference = (value.double() - expected.double()).abs().max()
            assert torch.equal(value, expected), f"{name} differs by up to {difference}"
