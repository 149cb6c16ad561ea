"""Incoming gradients of a step, in the memory layout that the backward was traced with.

The differentiated outputs of a graph are the model's own, and parameters that it has updated: autograd could continue
from these, so the graph has an incoming gradient for them, which is zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_fx.pipeline.graph import PipelinedGraph
from roundpipe_fx.torch_private import size_hint

__all__ = ["Like", "gradients_of_loss", "incoming_gradient"]


def gradients_of_loss(graph: PipelinedGraph, loss: int, primals: Sequence[Any], weight: float) -> list[torch.Tensor]:
    """The incoming gradients of a microbatch: its loss's weight, and zeros for parameters that it updates.

    Args:
        graph: its compiled programs.
        loss: number of the output that is the loss.
        primals: its inputs.
        weight: of its loss in that of the batch.
    """
    gradients = []
    for place, traced, strided in zip(graph.main.tangents, graph.tangents, graph.strided, strict=True):
        if place == loss:
            gradients.append(torch.full((), weight, dtype=traced.dtype, device=traced.device))
        else:
            like = Like.of(primals[graph.main.mutations[place]], traced)
            on_device = dataclasses.replace(like, device=traced.device)  # an offloaded model's lies on the host
            gradients.append(incoming_gradient(None, on_device, strided))
    return gradients


@dataclass(frozen=True)
class Like:
    """The expected properties of an incoming gradient."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, output: torch.Tensor, traced: torch.Tensor) -> Like:
        """A tensor of the output's shape, with its dimensions in memory in the order that the gradient was traced
        with."""
        stride = traced.stride()
        if not all(isinstance(step, int) for step in stride):
            hints = [size_hint(step) for step in stride]
            steps, following = [0] * len(hints), 1
            for dim in sorted(range(len(hints)), key=lambda dim: (hints[dim], -dim)):
                steps[dim] = following
                following *= max(output.shape[dim], 1)
            stride = tuple(steps)
        return cls(output.shape, stride, output.dtype, output.device)


def incoming_gradient(gradient: torch.Tensor | None, like: Like, strided: bool) -> torch.Tensor:
    """An incoming gradient with the strides that it was traced with; zeros if its output was not used."""
    if gradient is None and not strided:
        return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
    if gradient is not None and gradient.stride() == like.stride:
        return gradient
    made = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)
    return made.zero_() if gradient is None else made.copy_(gradient)
