"""What a thousand steps over two processes leave behind: a pipeline, and replicas that share out parameters.

::

    python -m benchmarks.growth [--steps 1000]

It takes about a minute. A step is forward, backward and the optimizer's update of a small model. What is there after a
quarter of the steps is compared with what is there after the last, on the process where they differ most. Resident
bytes are those after the allocator has given back what it can, and differ a little either way.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import resource
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import roundpipe_fx
from benchmarks.side_by_side import report, show
from roundpipe_fx.distributed.group import PipelineGroup, Replicas

RANKS = 2
STEPS = 1000

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "a pipeline of two": ("pp", {}),
    "two replicas, shard='dp'": ("dp", {"shard": "dp", "stages": 2}),
}
"""Dimension of the mesh and options, by name."""

_STARTED = (
    (PipelineGroup, "start_send"),
    (PipelineGroup, "start_receive"),
    (Replicas, "start_gather"),
    (Replicas, "start_sum_of_part"),
)


def grown(rank: int, folder: str, steps: int, results: Any) -> None:
    """Train in each way. Puts a row for each into ``results``, with differences between before and after."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    rows = [{"two processes": name, "steps": steps, **_grown(steps, *way)} for name, way in WAYS.items()]
    everywhere: list[Any] = [None] * RANKS
    dist.all_gather_object(everywhere, rows)
    if rank == 0:
        results.put(
            [max(own, key=lambda row: [abs(value) for value in _figures(row)]) for own in zip(*everywhere, strict=True)]
        )
    dist.barrier()
    dist.destroy_process_group()


def _figures(row: dict[str, Any]) -> list[float]:
    return [value for value in row.values() if not isinstance(value, str)]


def _grown(steps: int, dimension: str, options: dict[str, Any]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=(dimension,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    batch = {"labels": x, "loss_fn": nn.functional.mse_loss}
    compiled = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=2, **options)
    compiled.trace(x, **batch)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.01, momentum=0.9)

    def train(count: int) -> None:
        for _ in range(count):
            compiled.forward_backward(x, **batch)
            optimizer.step()
            optimizer.zero_grad()

    with _works() as works:
        train(steps // 4)
        before = _counts()
        train(steps - steps // 4)
        after = _counts()
        left = len(works)
    return {
        "more tensors": after["tensors"] - before["tensors"],
        "objects": after["objects"] - before["objects"],
        "threads": after["threads"] - before["threads"],
        "files": after["files"] - before["files"],
        "works left": left,
        "resident KiB": (after["resident"] - before["resident"]) // 1024,
    }


def _counts() -> dict[str, int]:
    """What is there between two steps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    objects = gc.get_objects()
    return {
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in objects),
        "objects": len(objects),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
    }


@contextlib.contextmanager
def _works() -> Iterator[weakref.WeakSet[dist.Work]]:
    """Context manager that collects the operations that are started in it, as long as somebody holds them."""
    works: weakref.WeakSet[dist.Work] = weakref.WeakSet()
    originals = [(owner, name, getattr(owner, name)) for owner, name in _STARTED]
    for owner, name, start in originals:

        def started(*arguments: Any, start: Any = start) -> dist.Work:
            work: dist.Work = start(*arguments)
            works.add(work)
            return work

        setattr(owner, name, started)
    try:
        yield works
    finally:
        for owner, name, start in originals:
            setattr(owner, name, start)


def measured(steps: int) -> list[dict[str, Any]]:
    """A row for each way to train."""
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(grown, (folder, steps, results), nprocs=RANKS)
    rows: list[dict[str, Any]] = results.get()
    return rows


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="It takes about a minute.")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"{STEPS} by default; others are not stored")
    steps = parser.parse_args().steps
    title = f"growth from step {steps // 4} to step {steps} (target: none)"
    rows = measured(steps)
    if steps == STEPS:
        report("growth", title, rows)
    else:
        show(title, rows)


if __name__ == "__main__":
    main()
