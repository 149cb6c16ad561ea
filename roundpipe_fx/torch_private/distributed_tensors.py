"""Distributed tensors: what a rank has of a DTensor, as a traced graph gets it."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

__all__ = ["local_part"]


def local_part(value: DTensor) -> torch.Tensor:
    """The local tensor of a DTensor, always the same object. ``to_local()`` of a parameter makes a view each time."""
    return value._local_tensor
