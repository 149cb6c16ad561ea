"""Modelled seconds of a step beside those of published runs: python -m benchmarks.published

Figures are as torchtitan publishes them, in its repository pytorch/torchtitan:
``benchmarks/llama3_h100_202412_torchtitan.md``, tables 1 and 3, FSDP without float8: eight H100s a node with NVLink,
400 Gb/s of network per device, 96 GB of memory at 2.4 TB/s, power limited to 500 W. Activations are checkpointed
selectively. And ``docs/performance.md`` there: Llama 3 on 64 A100s of 80 GB with FSDP alone, a row of 8,192 tokens on
each; activations of 8B checkpointed selectively, by operation, those of 70B all.

Sequences are taken to have 8,192 tokens, the default of torchtitan's Llama 3 configurations. All have parameters and
the optimizer's state sharded over all devices, in stages of one layer here. What is not modelled: the optimizer's
step, parameters in float32 that are gathered as bfloat16, and those devices' memory and power limit.
Runs with tensor parallelism are in :mod:`benchmarks.published_parallel`. Plans have no float8, and no context
parallelism.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import roundpipe_fx
from benchmarks.models import llama_8b, llama_70b
from benchmarks.side_by_side import fresh, rates_of, report


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run of a Llama, sharded over all devices unless the mesh has pipelines.

    Attributes:
        name: how it ran.
        device: name of the device.
        mesh: sizes of the dimensions dp and pp; a number: devices that are divided.
        rows: of a replica's batch, of devices that are divided the whole batch's.
        make: makes the model.
        tokens: of a row.
        published: tokens a second of each device; ``None``: nothing was published.
    """

    name: str
    device: str
    mesh: tuple[int, int] | int
    rows: int
    make: Callable[[], nn.Module] = llama_8b
    tokens: int = 8192
    published: int | None = None


RUNS = (
    _Run(name="8B, eager", device="H100", mesh=(8, 1), rows=2, published=5762),
    _Run(name="8B, torch.compile", device="H100", mesh=(8, 1), rows=2, published=6667),
    _Run(name="8B, eager", device="H100", mesh=(128, 1), rows=2, published=5605),
    _Run(name="8B, torch.compile", device="H100", mesh=(128, 1), rows=2, published=6514),
    _Run(name="8B, eager", device="A100", mesh=(64, 1), rows=1, published=2973),
    _Run(name="70B, eager", device="A100", mesh=(64, 1), rows=1, make=llama_70b, published=331),
    _Run(name="8B, not published", device="H100", mesh=(64, 16), rows=32),
    _Run(name="8B, 4,096 tokens, not published", device="H100", mesh=(64, 16), rows=32, tokens=4096),
    _Run(name="8B, 2,048 rows, division chosen, not published", device="H100", mesh=1024, rows=2048),
)


def main() -> None:
    rows: list[dict[str, Any]] = []
    plans: dict[Any, tuple[roundpipe_fx.Plan, float]] = {}
    for run in fresh([*RUNS]):
        key = run.device, run.mesh, run.rows, run.tokens, run.make
        if key not in plans:  # eager and compiled runs have one plan
            plans[key] = _planned(run)
        rows.append(row_of(run, *plans[key]))
    title = "Llama 3 as modelled and as published by torchtitan (target: 1,024 devices in 60 s)"
    report("published", title, rows, rates_of("A100", "H100"))


def _planned(run: _Run) -> tuple[roundpipe_fx.Plan, float]:
    model: Any = run.make()
    tokens = torch.empty(run.rows, run.tokens, dtype=torch.long, device="meta")
    fsdp = isinstance(run.mesh, tuple) and run.mesh[1] == 1
    start = time.perf_counter()
    plan = roundpipe_fx.plan(
        model,
        input_ids=tokens,
        labels=tokens,
        device=run.device,
        mesh_shape=run.mesh,
        shard="dp" if fsdp else None,
        stages=model.config.num_hidden_layers + 1 if fsdp else "auto",
        num_microbatches=1 if fsdp else None,
        schedule="auto" if isinstance(run.mesh, int) else None,
        optimizer=torch.optim.AdamW(model.parameters()),
    )
    return plan, time.perf_counter() - start


def row_of(run: _Run, plan: roundpipe_fx.Plan, seconds: float) -> dict[str, Any]:
    """The row of a run.

    Args:
        run: the run.
        plan: of its step.
        seconds: that planning took.
    """
    pipeline = plan.pipeline
    assert pipeline is not None and pipeline.mesh is not None
    theirs = None
    if run.published is not None:
        theirs = run.rows * run.tokens / (run.published * len(pipeline.devices))
    return {
        "run": run.name,
        "devices": f"{pipeline.mesh.replicas} × {len(pipeline.devices)} {run.device}",
        "published tokens/s": run.published or "",
        "published s": theirs or "",
        "modelled s": pipeline.makespan,
        "modelled / published": pipeline.makespan / theirs if theirs is not None else "",
        "modelled tokens/s": round(pipeline.tokens_per_second or 0),
        "not hidden": f"{pipeline.mesh.unhidden_seconds / pipeline.makespan:.1%}",
        "fullest device GiB": max(pipeline.device_bytes) / 2**30,
        "s to plan": seconds,
    }


if __name__ == "__main__":
    main()
