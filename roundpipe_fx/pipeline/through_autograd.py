"""A pipelined step as one function of autograd: all forwards when called, all backwards when differentiated.

What autograd sees is a single node, from the parameters and inputs to every microbatch's outputs. When it is reached,
all incoming gradients are there, and the backwards of all microbatches run as scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from roundpipe_fx.pipeline.taken import Taken
from roundpipe_fx.runtime.pipeline_run import Finished

__all__ = ["through_autograd"]

Run = Callable[[Sequence[Sequence[Any]], list[dict[int, Any]] | None], Finished]
"""Runs all forwards, or with what they have left, all backwards; gets the incoming gradients of each microbatch."""


def through_autograd(taken: Taken, run: Run) -> list[list[Any]]:
    """Each microbatch's results, with the backwards behind them."""
    flat = _PipelinedStep.apply(_Step(taken, run), *_differentiable(taken.primals))
    return [list(own) for own in _chunks(flat, [len(program.outputs) for program in taken.programs])]


class _Step:
    """A step between its forward and its backward."""

    def __init__(self, taken: Taken, run: Run) -> None:
        self.taken = taken
        self.run = run
        self.values: list[dict[int, Any]] | None = None
        self.versions: list[tuple[torch.Tensor, int]] = []
        self.likes: list[dict[int, _Like]] = []

    def forward(self) -> list[list[Any]]:
        finished = self.run([[] for _ in self.taken.programs], None)
        self.values = finished.values
        self.likes = [
            {place: _Like.of(own[place]) for place in program.tangents}
            for program, own in zip(self.taken.programs, finished.outputs, strict=True)
        ]
        mutated = {
            id(primals[place])
            for program, primals in zip(self.taken.programs, self.taken.primals, strict=True)
            for place in program.mutations.values()
        }
        read = [value for primals in self.taken.primals for value in primals if id(value) not in mutated]
        read += [value for values in self.values for value in values.values()]
        self.versions = [(value, value._version) for value in read if isinstance(value, torch.Tensor)]
        return finished.outputs

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        if self.values is None:
            raise RuntimeError(
                "the backward of this pipelined step has run already, and what it needs is freed: call the model again."
            )
        for value, version in self.versions:
            if value._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(value.shape)} that the backward of this pipelined step needs was "
                    "changed in place after the forward."
                )
        self.versions = []
        values, self.values = self.values, None
        tangents = [
            [_tangent(own[place], like, graph.strided) for place, like in likes.items()]
            for own, likes, graph in zip(
                _chunks(gradients, [len(program.outputs) for program in self.taken.programs]),
                self.likes,
                self.taken.graphs,
                strict=True,
            )
        ]
        return self.run(tangents, values).gradients


class _PipelinedStep(torch.autograd.Function):
    """All microbatches of a step as one function: of the parameters and inputs, to every microbatch's outputs."""

    @staticmethod
    def forward(ctx: Any, step: _Step, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.step = step
        ctx.keys = [id(tensor) for tensor in tensors]
        ctx.set_materialize_grads(False)
        outputs = step.forward()
        fixed = []
        for program, own in zip(step.taken.programs, outputs, strict=True):
            rest = set(range(len(own))) - set(program.tangents)
            fixed += [own[place] for place in rest if isinstance(own[place], torch.Tensor)]
        ctx.mark_non_differentiable(*fixed)
        return tuple(value for own in outputs for value in own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        found = ctx.step.backward(gradients)
        return (None, *(found.get(key) for key in ctx.keys))


def _differentiable(primals: Sequence[Sequence[Any]]) -> list[torch.Tensor]:
    found = {id(v): v for own in primals for v in own if isinstance(v, torch.Tensor) and v.requires_grad}
    return list(found.values())


@dataclass(frozen=True)
class _Like:
    """What an incoming gradient must look like: its output."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, output: torch.Tensor) -> _Like:
        return cls(output.shape, output.stride(), output.dtype, output.device)


def _tangent(gradient: torch.Tensor | None, like: _Like, strided: bool) -> torch.Tensor:
    """An incoming gradient with the strides of its output; zeros where nobody used that."""
    if gradient is None and not strided:
        return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
    if gradient is not None and gradient.stride() == like.stride:
        return gradient
    made = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)
    return made.zero_() if gradient is None else made.copy_(gradient)


def _chunks(values: Sequence[Any], counts: Sequence[int]) -> Iterator[Sequence[Any]]:
    start = 0
    for count in counts:
        yield values[start : start + count]
        start += count
