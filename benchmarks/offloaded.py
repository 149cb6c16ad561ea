"""A model that is larger than its GPU: how far a step with the weights on the host is from one that waits for none.

python -m benchmarks.offloaded

A Llama of 8B parameters in bfloat16 on the meta device, planned for one RTX 4090 while it stays on the CPU, with ever
more microbatches of 2048 tokens. Figures are of the simulator. A step is held against its own operations run once,
with nothing recomputed and nothing waited for; and against a step of each microbatch alone, which is how often weights
come where they are brought for every forward and backward (ZeRO-Infinity, FSDP's CPU offload).
"""

from __future__ import annotations

import time
from typing import Any

import torch

import roundpipe_fx
from benchmarks.models import llama_8b
from benchmarks.side_by_side import fresh, report

_DEVICE, _TOKENS = "RTX 4090", 2048


def main() -> None:
    rows: list[dict[str, Any]] = []
    for microbatches in fresh([1, 2, 4, 8, 16]):
        rows.append(_planned(microbatches))
        alone = microbatches * rows[0]["modelled s"]
        rows[-1]["s / s of each microbatch alone"] = rows[-1]["modelled s"] / alone
    report("offloaded", f"Llama of 8B parameters on the CPU, trained on one {_DEVICE}", rows)


def _planned(microbatches: int) -> dict[str, Any]:
    model = llama_8b()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    tokens = torch.empty(microbatches, _TOKENS, dtype=torch.long, device="meta")
    began = time.perf_counter()
    plan = roundpipe_fx.report.plan(
        model, input_ids=tokens, labels=tokens, device=_DEVICE, offloaded=True, num_microbatches=microbatches
    )
    assert plan.pipeline is not None
    once = microbatches * sum(own.forward_seconds + own.backward_seconds for own in plan.stages)
    return {
        "microbatches": microbatches,
        "slots": len(plan.stages),
        "peak GiB": max(plan.pipeline.peak_bytes) / 2**30,
        "weights GiB": weights / 2**30,
        "brought / weights": plan.pipeline.brought_bytes / weights,
        "modelled s": plan.pipeline.makespan,
        "s / s of operations once": plan.pipeline.makespan / once,
        "recomputed / forward": plan.recompute_seconds / plan.forward_seconds,
        "s to plan": time.perf_counter() - began,
    }


if __name__ == "__main__":
    main()
