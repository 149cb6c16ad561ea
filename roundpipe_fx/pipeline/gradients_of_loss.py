"""Incoming gradients of a step, in the memory layout that the backward was traced with.

The differentiated outputs of a graph are the model's own, and parameters that it has updated: autograd could continue
from these, so the graph has an incoming gradient for them, which is zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from roundpipe_fx.pipeline.graph import PipelinedGraph
from roundpipe_fx.runtime.incoming_gradients import Like, incoming_gradient

__all__ = ["gradients_of_loss"]


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
