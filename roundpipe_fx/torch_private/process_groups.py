"""Process groups: the store that all ranks share, and a group's timeout."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["default_store", "group_timeout"]


def default_store() -> dist.Store:
    """The store with which the default process group was initialized."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long the operations of a process group may take."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout
