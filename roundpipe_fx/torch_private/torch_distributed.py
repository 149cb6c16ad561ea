"""``torch.distributed``: the store that all ranks share, groups and their collectives in a traced graph, local parts of
DTensors, specifications of ``torch.distributed.pipelining``."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

__all__ = [
    "default_store",
    "group_ranks",
    "group_timeout",
    "is_replicate_spec",
    "largest_of_group",
    "local_part",
    "wait_for_collective",
]


def default_store() -> dist.Store:
    """The store with which the default process group was initialized."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def group_timeout(group: dist.ProcessGroup, device: str) -> timedelta:
    """Time that operations of a process group on tensors of a type of device may take."""
    timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
    return timeout


def group_ranks(group: Any) -> list[int]:
    """The ranks of a process group as a collective of a traced graph names it; empty: this process has none such."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    if isinstance(group, str):
        try:
            group = _resolve_process_group(group)  # type: ignore[arg-type]
        except (RuntimeError, LookupError):
            return []
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []


def wait_for_collective(value: torch.Tensor) -> None:
    """Wait for the functional collective that a tensor is the result of."""
    from torch.distributed._functional_collectives import wait_tensor

    wait_tensor(value)


def largest_of_group(value: torch.Tensor, group: Any) -> torch.Tensor:
    """The largest elements of all ranks of a process group as a collective of a traced graph names it."""
    from torch.distributed._functional_collectives import all_reduce, wait_tensor

    largest: torch.Tensor = wait_tensor(all_reduce(value, "max", group))
    return largest


def is_replicate_spec(spec: Any) -> bool:
    """Return whether a specification says that a value is the same for every microbatch: ``_Replicate``, or one of it.

    Args:
        spec: the user's. Where the user has not imported its module, it cannot be one, and the module is not imported.
    """
    if "torch.distributed.pipelining.microbatch" not in sys.modules:
        return False
    from torch.distributed.pipelining.microbatch import _Replicate

    return issubclass(spec if isinstance(spec, type) else type(spec), _Replicate)


def local_part(value: DTensor) -> torch.Tensor:
    """The local tensor of a DTensor, always the same object. ``to_local()`` of a parameter makes a view each time."""
    return value._local_tensor
