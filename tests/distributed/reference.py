"""Reference results of one process, computed by rank 0 for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["train_on_rank_0"]

Result = TypeVar("Result")


def train_on_rank_0(model: nn.Module, train: Callable[[], Result]) -> Result:
    """Call ``train()`` on rank 0 alone, and leave on all ranks what it leaves there.

    Args:
        train: changes ``model``'s parameters, gradients and buffers, and the generator's state.

    Returns:
        What ``train`` returns on rank 0.
    """
    tensors = [*model.parameters(), *model.buffers()]
    shared: list[tuple[Result, list[tuple[torch.Tensor, torch.Tensor | None]], torch.Tensor] | None] = [None]
    if dist.get_rank() == 0:
        result = train()
        shared = [(result, [(value.detach(), value.grad) for value in tensors], torch.get_rng_state())]
    dist.broadcast_object_list(shared)
    assert shared[0] is not None
    result, values, state = shared[0]
    with torch.no_grad():
        for tensor, (value, gradient) in zip(tensors, values, strict=True):
            tensor.copy_(value)
            tensor.grad = gradient
    torch.set_rng_state(state)
    return result
