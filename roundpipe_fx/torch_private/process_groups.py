"""Process groups: the store that all ranks share, a group's timeout, a group in a traced graph and its collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["default_store", "group_ranks", "group_timeout", "largest_of_group", "wait_for_collective"]


def default_store() -> dist.Store:
    """The store with which the default process group was initialized."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def group_timeout(group: dist.ProcessGroup, device: str) -> timedelta:
    """How long the operations of a process group on tensors of a type of device may take."""
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
