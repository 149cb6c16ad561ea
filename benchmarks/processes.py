"""Two processes, a core each, on gloo: a pipeline against PyTorch's, DistributedDataParallel and FSDP2.

Every step is the forward and backward of one batch of the same language model. The pipelines split it into
microbatches and run 1F1B; stages of ``torch.distributed.pipelining`` are cut by hand at the block that makes its step
shortest, found by trying all of them. Our pipeline also runs in one process, in threads on both cores, which share the
interpreter's lock. DistributedDataParallel and FSDP2 give half of the batch to each process, and so
do our replicas, whose budget is their peak.

::

    python -m benchmarks.processes [--quick]

It takes about five minutes (with ``--quick`` one). Peaks are those of the process that has more: what it
allocates during a step beyond what it held when the step began. Ratios are medians of those of each round.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import roundpipe_fx
from benchmarks.side_by_side import paired, report, show
from roundpipe_fx.schedules import StepCosts, simulate_time

RANKS = 2
BUSY = 1.0
"""Load average above which figures are not stored."""


@dataclass(frozen=True)
class Size:
    """How much is run.

    Attributes:
        layers: of the model.
        width: of the model.
        vocabulary: of the model.
        rows: of a batch.
        length: of a row, in tokens.
        microbatches: of a batch.
        rounds: timed steps.
    """

    layers: int = 8
    width: int = 256
    vocabulary: int = 4096
    rows: int = 16
    length: int = 128
    microbatches: int = 8
    rounds: int = 9


QUICK = Size(layers=3, width=32, vocabulary=64, rows=8, length=16, microbatches=4, rounds=1)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of tokens to rows of tokens."""
        parts = self.query_key_value(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def make(size: Size) -> nn.Sequential:
    """The model, the same in each process."""
    torch.manual_seed(0)
    blocks = [Block(size.width) for _ in range(size.layers)]
    return nn.Sequential(
        nn.Embedding(size.vocabulary, size.width), *blocks, nn.Linear(size.width, size.vocabulary, bias=False)
    )


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


Step = Callable[[], torch.Tensor]
"""Runs forward and backward from no gradients; returns the loss of the batch, on every rank."""


def ours(size: Size, tokens: torch.Tensor, **options: Any) -> tuple[nn.Module, Step]:
    """Our pipeline."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    model = roundpipe_fx.compile(
        make(size), mesh=mesh, num_microbatches=size.microbatches, schedule="1f1b", dynamic=False, **options
    )
    model.trace(tokens, labels=tokens, loss_fn=loss_fn)

    def step() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model.forward_backward(tokens, labels=tokens, loss_fn=loss_fn)
        return loss

    return model, step


def in_threads(size: Size, tokens: torch.Tensor, cores: Sequence[int]) -> tuple[nn.Module, Step]:
    """Our pipeline in the first process, with a thread for each device, while the other process waits.

    Args:
        size: how much is run.
        tokens: the batch.
        cores: those of both processes.
    """
    model: Any = nn.Module()
    if dist.get_rank() == 0:
        options = {"num_microbatches": size.microbatches, "schedule": "1f1b", "dynamic": False}
        model = roundpipe_fx.compile(make(size), devices=["cpu"] * RANKS, **options)

    def step() -> torch.Tensor:
        loss = torch.zeros(())
        if dist.get_rank() == 0:
            alone = os.sched_getaffinity(0)
            os.sched_setaffinity(0, cores)  # of the threads that begin now: those of the devices
            model.zero_grad()
            loss = model.forward_backward(tokens, labels=tokens, loss_fn=loss_fn)
            os.sched_setaffinity(0, alone)
        dist.broadcast(loss, 0)
        return loss

    return model, step


def our_replicas(size: Size, tokens: torch.Tensor, **options: Any) -> tuple[nn.Module, Step]:
    """The whole model in each process, with half of the batch."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    model = roundpipe_fx.compile(make(size), mesh=mesh, num_microbatches=1, dynamic=False, **options)
    own = tokens.chunk(RANKS)[dist.get_rank()]
    model.trace(own, labels=own, loss_fn=loss_fn)

    def step() -> torch.Tensor:
        model.zero_grad()
        return _mean(model.forward_backward(own, labels=own, loss_fn=loss_fn))

    return model, step


def pytorchs(size: Size, tokens: torch.Tensor, cut: int) -> tuple[nn.Module, Step]:
    """PyTorch's pipeline, whose second stage begins at block ``cut``."""
    layers, rank = list(make(size)), dist.get_rank()
    module = nn.Sequential(*(layers[: cut + 1] if rank == 0 else layers[cut + 1 :]))
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, size.microbatches, loss_fn=loss_fn, scale_grads=True)

    def step() -> torch.Tensor:
        module.zero_grad()
        losses: list[torch.Tensor] = []
        loss = torch.zeros(())
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=tokens, losses=losses)
            loss = torch.stack(losses).mean().detach()
        dist.broadcast(loss, RANKS - 1)
        return loss

    return module, step


def replicated(wrap: Callable[[nn.Sequential], nn.Module], size: Size, tokens: torch.Tensor) -> tuple[nn.Module, Step]:
    """The whole model in each process, with half of the batch."""
    model = wrap(make(size))
    own = tokens.chunk(RANKS)[dist.get_rank()]

    def step() -> torch.Tensor:
        model.zero_grad()
        loss = loss_fn(model(own), own)
        loss.backward()
        return _mean(loss.detach())

    return model, step


def _mean(loss: torch.Tensor) -> torch.Tensor:
    total = loss.clone()
    dist.all_reduce(total)
    return total / RANKS


def _fully_sharded(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _seconds(step: Step) -> float:
    """Of the slowest process."""
    dist.barrier()
    start = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def _largest(value: int) -> int:
    """Of all processes."""
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found.item())


def _held(model: nn.Module) -> int:
    return sum(
        (value.to_local() if hasattr(value, "to_local") else value).untyped_storage().nbytes()
        for value in model.parameters()
    )


def _peak(step: Step) -> int:
    """Of the process that has more."""
    with roundpipe_fx.measure_peak("cpu") as peak:
        step()
    return _largest(peak.bytes)


def _makespan(model: Any, step: Step, runs: int) -> dict[str, Any]:
    """The median measured makespan of our pipeline, and the simulator's with the median seconds of the actions."""
    spans, seconds = [], defaultdict(list)
    for _ in range(runs):
        step()
        own = [(bar.action.step, bar.start, bar.end) for bar in model.plan.timeline().measured]
        everywhere: list[Any] = [None] * RANKS
        dist.all_gather_object(everywhere, own)
        # The first rank runs the first action and the last one, and each has a clock of its own.
        spans.append(max(end for *_, end in everywhere[0]) - min(start for _, start, _ in everywhere[0]))
        for action, start, end in (bar for of_rank in everywhere for bar in of_rank):
            seconds[action].append(end - start)
    timing = model.plan.timing
    costs = StepCosts(seconds={action: statistics.median(found) for action, found in seconds.items()})
    measured, simulated = statistics.median(spans), simulate_time(timing.schedule, timing.graph, costs).makespan
    return {"makespan s": measured, "simulated s": simulated, "measured / simulated": measured / simulated}


def _best_cut(size: Size, tokens: torch.Tensor) -> int:
    """Where the second stage of PyTorch's pipeline begins so that its step is shortest."""
    taken = {}
    for cut in range(1, size.layers + 1):
        _, step = pytorchs(size, tokens, cut)
        taken[cut] = statistics.median([_seconds(step) for _ in range(1 + min(3, size.rounds))][1:])
    return min(taken, key=taken.__getitem__)


def _measure(rank: int, folder: str, size: Size, results: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    tokens = torch.randint(size.vocabulary, (size.rows, size.length), generator=torch.Generator().manual_seed(0))
    cut = _best_cut(size, tokens)
    pipelining, replicas, shards = f"torch.distributed.pipelining, cut at {cut}", "DistributedDataParallel", "FSDP2"
    methods = {
        pipelining: pytorchs(size, tokens, cut),
        replicas: replicated(DistributedDataParallel, size, tokens),
        shards: replicated(_fully_sharded, size, tokens),
    }
    losses = {name: step().item() for name, (_, step) in methods.items()}
    peaks = {name: _peak(step) for name, (_, step) in methods.items()}
    part = {"shard": "dp", "stages": size.layers}
    of_ours = {
        "roundpipe_fx": (pipelining, ours(size, tokens)),
        "roundpipe_fx, 0.7 × its peak": (pipelining, ours(size, tokens, memory_budget=peaks[pipelining] * 7 // 10)),
        "roundpipe_fx, least budget": (pipelining, ours(size, tokens, memory_budget=0.0)),
        "roundpipe_fx, threads of one process": (pipelining, in_threads(size, tokens, cores[:RANKS])),
        "roundpipe_fx, replicas": (replicas, our_replicas(size, tokens, memory_budget=peaks[replicas])),
        "roundpipe_fx, shards": (shards, our_replicas(size, tokens, memory_budget=peaks[shards], **part)),
    }
    if size != QUICK:
        of_ours |= {
            "roundpipe_fx, replicas, least budget": (replicas, our_replicas(size, tokens, memory_budget=0.0)),
            "roundpipe_fx, shards, least budget": (shards, our_replicas(size, tokens, memory_budget=0.0, **part)),
        }
    for name, (_, made) in of_ours.items():
        methods[name] = made
        losses[name], peaks[name] = made[1]().item(), _peak(made[1])
    rounds = paired({name: functools.partial(_seconds, step) for name, (_, step) in methods.items()}, size.rounds)
    rows = []
    for name, (model, _) in methods.items():
        peer = of_ours[name][0] if name in of_ours else name
        rows.append(
            {
                "two processes": name,
                "beside": {pipelining: "pipelining", replicas: "DDP", shards: "FSDP2"}[peer] if peer != name else "",
                "s a step": statistics.median(own[name] for own in rounds),
                "time ratio": statistics.median(own[name] / own[peer] for own in rounds),
                "peak MB": peaks[name] / 1e6,
                "peak ratio": peaks[name] / peaks[peer],
                "parameters MB": _largest(_held(model)) / 1e6,
                "loss": losses[name],
            }
        )
    makespans = {
        name: _makespan(*methods[name], max(3, size.rounds)) for name in ("roundpipe_fx", "roundpipe_fx, least budget")
    }
    if rank == 0:
        results.put((rows, [{"two processes": name, **row} for name, row in makespans.items()]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="It takes about five minutes.")
    parser.add_argument("--quick", action="store_true", help="a small model, in a minute; nothing is stored")
    size = QUICK if parser.parse_args().quick else Size()
    before, start = os.getloadavg()[0], time.perf_counter()
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_measure, (folder, size, results), nprocs=RANKS)
    rows, makespans = results.get()
    print(f"{(time.perf_counter() - start) / 60:.1f} minutes")
    title = (
        f"{size.layers} blocks of width {size.width}, vocabulary {size.vocabulary}, {size.rows} × {size.length} "
        f"tokens, {size.microbatches} microbatches; median of {size.rounds} interleaved steps (targets: at most 0.97 × "
        "the time of torch.distributed.pipelining, also at 0.7 × its peak; at most the time of DDP and FSDP2)"
    )
    of_makespans = "the makespan of our pipeline beside the simulator's, with measured actions (target: within 10 %)"
    for name, heading, found in (("processes", title, rows), ("processes_makespan", of_makespans, makespans)):
        if size is QUICK or before > BUSY:
            show(heading, found)
        else:
            report(name, heading, found)
    if size is not QUICK and before > BUSY:
        print(f"not stored: the machine was busy (load average {before:.1f})")


if __name__ == "__main__":
    main()
