"""Checks that run in several processes, which communicate by gloo."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["Check", "in_processes", "in_two_processes", "start_processes"]

Check = Callable[[int, str], None]
"""Takes the rank of its process and a folder that both share."""

_PRELOADED = ["roundpipe_fx", "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"]


def in_two_processes(checks: Sequence[Check], folder: Path) -> None:
    """Run checks one after another, each in both processes. Arguments as for :func:`in_processes`."""
    in_processes(2, checks, folder)


def in_processes(count: int, checks: Sequence[Check], folder: Path) -> None:
    """Run checks one after another, each in all processes.

    Args:
        count: number of processes.
        checks: functions of modules.
        folder: an empty one.
    """
    # A file, not a port: another test may take the port, and a server of keys may leave before its clients.
    start_processes(_process, (count, str(folder), checks), count)


def start_processes(function: Callable[..., None], arguments: tuple[object, ...], count: int) -> None:
    """Run ``function(rank, *arguments)`` in processes, and wait for them; an exception in one is raised.

    They are forked from a server without threads, which has imported once what takes most of them seconds to import.
    The server has the environment of the first call: what is changed later does not reach them.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    torch.multiprocessing.start_processes(function, arguments, nprocs=count, start_method="forkserver")


def _process(rank: int, count: int, folder: str, checks: Sequence[Check]) -> None:
    torch.set_num_threads(1)  # kernels add in another order on other numbers of threads, and bits are compared
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    try:
        for check in checks:
            check(rank, folder)
        dist.barrier()  # a process that left now would reset connections that others still read
    finally:
        dist.destroy_process_group()
        gc.collect()  # meshes of the checks keep groups; threads of those must end before the interpreter is finalized
