"""Modelled seconds beside those of published runs with tensor parallelism: python -m benchmarks.published_parallel

Over eight devices of a node, as all of these runs:

- torchtitan, in its repository pytorch/torchtitan, ``benchmarks/llama3_h100_202412_torchtitan.md``, tables 4 and 5:
  Llama 3.1 of 70B and 405B on H100s (the nodes as in :mod:`benchmarks.published`), with float8 and torch.compile, all
  activations checkpointed; sequences of 8,192 tokens. Plans are for bfloat16, and do not hide the communication of
  tensor parallelism, as torchtitan's does for 405B. The 16 rows of 70B are as many microbatches here. Into how many the
  pipeline split its batch is not published; here the default of that time, one for each of its stages.
- Megatron: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
  arXiv 2104.04473, table 1, also in the README of that year: FLOP/s of each GPU, with all activations recomputed and
  without sequence parallelism. Seconds follow from the paper's count of operations. How the 256 devices were divided
  and microbatches of one row are assumed.

What is not modelled: the optimizer's step, parameters and gradients in float32, dropout.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

import roundpipe_fx
from benchmarks.parallel_models import RANKS, gpt, llama
from benchmarks.side_by_side import fresh, rates_of, report


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run over groups of eight devices.

    Attributes:
        name: model, and how it ran.
        device: name of the device.
        make: makes the model.
        replicas: how many; parameters are sharded across them if ``sharded``.
        pipeline: groups of devices of each.
        rows: of a replica's batch.
        tokens: of a row.
        microbatches: of a replica's batch.
        seconds: published, of a step.
        sharded: whether parameters are sharded across replicas.
        stages: into how many the model is cut; ``None``: one for each group.
    """

    name: str
    device: str
    make: Callable[[], nn.Module]
    replicas: int
    pipeline: int
    rows: int
    tokens: int
    microbatches: int
    seconds: float
    sharded: bool = False
    stages: int | None = None


_70B = functools.partial(llama, layers=80, width=8192, inner=28672, heads=64)
_405B = functools.partial(llama, layers=126, width=16384, inner=53248, heads=128)


def _titan(name: str, speed: int, **how: Any) -> _Run:
    """A run of torchtitan's, of which tokens a second of each device are published."""
    seconds = how["rows"] * 8192 / (speed * how["pipeline"] * RANKS)
    return _Run(name=name, device="H100", tokens=8192, seconds=seconds, sharded=True, **how)


def _megatron(name: str, layers: int, width: int, heads: int, **how: Any) -> _Run:
    """A run of Megatron's, with microbatches of one row."""
    make = functools.partial(gpt, layers=layers, width=width, heads=heads)
    return _Run(name=name, device="A100", make=make, tokens=2048, microbatches=how["rows"], **how)


def _of_flops(teraflops: float, layers: int, width: int, batch: int, devices: int) -> float:
    """Seconds of a step: all operations that the paper counts, at the published rate."""
    tokens, words = 2048, 51_200
    count = 96 * batch * tokens * layers * width**2 * (1 + tokens / (6 * width) + words / (16 * layers * width))
    return count / (devices * teraflops * 1e12)


RUNS = (
    _titan("Llama 70B, float8", 829, make=_70B, replicas=32, pipeline=1, rows=16, microbatches=16, stages=81),
    _titan("Llama 405B, float8, 1F1B", 100, make=_405B, replicas=8, pipeline=8, rows=32, microbatches=8),
    _megatron(
        "GPT 18B, all recomputed",
        40,
        6144,
        48,
        replicas=32,
        pipeline=1,
        rows=32,
        seconds=_of_flops(135, 40, 6144, 1024, 256),
    ),
)


def main() -> None:
    rows = []
    for run in fresh([*RUNS]):
        start = time.process_time()
        plan = planned(run)
        rows.append(row_of(run, plan, time.process_time() - start))
    title = "Runs with tensor parallelism over 8 devices, as modelled and as published"
    report("published_parallel", title, rows, rates_of("A100", "H100"))


def planned(run: _Run) -> roundpipe_fx.Plan:
    """The plan of a run's step.

    Args:
        run: the run.
    """
    model = run.make()
    tokens = torch.empty(run.rows, run.tokens, dtype=torch.long, device="meta")
    with loss_parallel():
        return roundpipe_fx.plan(
            model,
            tokens,
            labels=tokens,
            device=run.device,
            mesh_shape=(run.replicas, run.pipeline, RANKS),
            shard="dp" if run.sharded else None,
            stages=run.stages or run.pipeline,
            num_microbatches=run.microbatches,
            optimizer=torch.optim.AdamW(model.parameters()),
        )


def row_of(run: _Run, plan: roundpipe_fx.Plan, seconds: float) -> dict[str, Any]:
    """The row of a run.

    Args:
        run: the run.
        plan: of its step.
        seconds: of the CPU that planning took.
    """
    pipeline = plan.pipeline
    assert pipeline is not None and pipeline.mesh is not None
    return {
        "run": run.name,
        "devices": f"{run.replicas} × {run.pipeline} × {RANKS} {run.device}",
        "microbatches": run.microbatches,
        "published s": run.seconds,
        "modelled s": pipeline.makespan,
        "modelled / published": pipeline.makespan / run.seconds,
        "tensor parallelism": f"{pipeline.mesh.tensor_parallel_seconds / pipeline.makespan:.1%}",
        "other communication not hidden": f"{pipeline.mesh.unhidden_seconds / pipeline.makespan:.1%}",
        "bubble": f"{pipeline.bubble:.1%}",
        "fullest device GiB": max(pipeline.device_bytes) / 2**30,
        "CPU s to plan": seconds,
    }


if __name__ == "__main__":
    main()
