"""Checks that run in several processes with a device each, which communicate by NCCL: the real one, or the emulated."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from tests.processes import start_processes

__all__ = ["on_devices"]

Check = Callable[[int], None]
"""Takes the rank of its process, which is also the number of its device."""


def on_devices(count: int, checks: Sequence[Check], folder: Path) -> None:
    """Run checks one after another, each in all processes. On emulated devices a race is an error.

    Args:
        count: number of processes.
        checks: functions of modules.
        folder: an empty one.
    """
    # Kernels of emulated devices add in another order on other numbers of threads, and bits are compared. As a variable
    # it holds in all threads: OpenMP's default in a new one is not what torch.set_num_threads says, until ATen asks.
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        start_processes(_process, (count, str(folder), checks), count)


def _process(rank: int, count: int, folder: str, checks: Sequence[Check]) -> None:
    backend, races = "nccl", list
    if "emulated_cuda" in os.environ.get("LD_PRELOAD", ""):
        from tests.emulated_cuda import cuda_module, nccl

        cuda_module.emulate()
        nccl.register()
        backend, races = nccl.NAME, cuda_module.device.races
    torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=count)
    try:
        for check in checks:
            check(rank)
            found = races()
            assert not found, "\n".join(found[:5])
        # A process that left now would reset connections that others still read; a barrier reads one itself.
        ended = dist.FileStore(f"{folder}/ended", count)
        ended.set(str(rank), "")
        ended.wait([str(other) for other in range(count)])
    finally:
        dist.destroy_process_group()
        gc.collect()
