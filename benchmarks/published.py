"""Modelled seconds of a step beside those of published runs: python -m benchmarks.published

Figures are as torchtitan publishes them, in its repository pytorch/torchtitan:
``benchmarks/llama3_h100_202412_torchtitan.md``, tables 1 and 3, FSDP without float8: eight H100s a node with NVLink,
400 Gb/s of network per device, 96 GB of memory at 2.4 TB/s, power limited to 500 W. Activations are checkpointed
selectively.

Sequences are taken to have 8,192 tokens, the default of torchtitan's Llama 3 configurations. All have parameters and
the optimizer's state sharded over all devices, in stages of one layer here. What is not modelled: the optimizer's
step, parameters in float32 that are gathered as bfloat16, clocks below the vendor's peak, and those devices' memory.
Runs with tensor or context parallelism, or float8, are not in the table, since no plan has these.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

import roundpipe_fx
from benchmarks.models import llama_8b
from benchmarks.side_by_side import fresh, report


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run of a Llama of 8B parameters, sharded over all devices unless the mesh has pipelines.

    Attributes:
        name: how it ran.
        device: name of the device.
        mesh: sizes of the dimensions dp and pp.
        rows: of a replica's batch.
        tokens: of a row.
        published: tokens a second of each device; ``None``: nothing was published.
    """

    name: str
    device: str
    mesh: tuple[int, int]
    rows: int
    tokens: int = 8192
    published: int | None = None


RUNS = (
    _Run(name="8B, eager", device="H100", mesh=(8, 1), rows=2, published=5762),
    _Run(name="8B, torch.compile", device="H100", mesh=(8, 1), rows=2, published=6667),
    _Run(name="8B, eager", device="H100", mesh=(128, 1), rows=2, published=5605),
    _Run(name="8B, torch.compile", device="H100", mesh=(128, 1), rows=2, published=6514),
    _Run(name="8B, not published", device="H100", mesh=(64, 16), rows=32),
    _Run(name="8B, 4,096 tokens, not published", device="H100", mesh=(64, 16), rows=32, tokens=4096),
)
_LAYERS = 32


def main() -> None:
    rows: list[dict[str, Any]] = []
    plans: dict[Any, tuple[roundpipe_fx.Plan, float]] = {}
    for run in fresh([*RUNS]):
        key = run.device, run.mesh, run.rows, run.tokens
        if key not in plans:  # eager and compiled runs have one plan
            plans[key] = _planned(run)
        rows.append(row_of(run, *plans[key]))
    report("published", "Llama 3.1 as modelled and as published by torchtitan (target: 1,024 devices in 60 s)", rows)


def _planned(run: _Run) -> tuple[roundpipe_fx.Plan, float]:
    model = llama_8b()
    tokens = torch.empty(run.rows, run.tokens, dtype=torch.long, device="meta")
    sharded = run.mesh[1] == 1
    start = time.perf_counter()
    plan = roundpipe_fx.plan(
        model,
        input_ids=tokens,
        labels=tokens,
        device=run.device,
        mesh_shape=run.mesh,
        shard="dp" if sharded else None,
        stages=_LAYERS + 1 if sharded else "auto",
        num_microbatches=1 if sharded else None,
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
        theirs = run.rows * run.tokens / (run.published * run.mesh[1])
    return {
        "run": run.name,
        "devices": f"{run.mesh[0]} × {run.mesh[1]} {run.device}",
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
