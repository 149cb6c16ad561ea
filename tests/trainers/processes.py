"""Checks that run in several processes, which communicate by gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["Check", "in_processes", "in_two_processes"]

Check = Callable[[int, str], None]
"""Takes the rank of its process and a folder that both share."""


def in_two_processes(checks: Sequence[Check], folder: Path) -> None:
    """Run checks one after another, each in both processes.

    Args:
        checks: functions of modules.
        folder: an empty one.
    """
    in_processes(2, checks, folder)


def in_processes(count: int, checks: Sequence[Check], folder: Path) -> None:
    """Run checks one after another, each in all of some processes.

    Args:
        count: how many processes.
        checks: functions of modules.
        folder: an empty one.
    """
    # A file, not a port: another test may take the port, and a server of keys may leave before its clients.
    torch.multiprocessing.spawn(_process, (str(folder), count, checks), nprocs=count)


def _process(rank: int, folder: str, count: int, checks: Sequence[Check]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    try:
        for check in checks:
            check(rank, folder)
        dist.barrier()  # a process that left now would reset connections that the other still reads
    finally:
        dist.destroy_process_group()
