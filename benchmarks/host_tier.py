"""Values of models on a GPU that leave for the host: what is recomputed within a budget, with the host and without it.

python -m benchmarks.host_tier

Planned for GPUs that need not be present, with the models' weights on them, and tokens in rows of 4,096.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import roundpipe_fx
from benchmarks.models import llama_1b, llama_8b
from benchmarks.side_by_side import fresh, rates_of, report

_CASES = (
    ("Llama 3.2 1B", "RTX 4090", 4, None),
    ("Llama 3.2 1B", "RTX 4090", 8, None),
    ("Llama 3.2 1B", "RTX 4090", 32, 4),
    ("Llama 3.2 1B", "H100", 16, None),
    ("Llama 3.1 8B", "H100", 4, None),
    ("Llama 3.1 8B", "H100", 8, None),
    ("Llama 3.1 8B", "H100", 16, None),
    ("Llama 3.1 8B", "H100", 32, 4),
)
"""Model, device, rows, and microbatches; ``None``: there are none."""
_MODELS = {"Llama 3.2 1B": llama_1b, "Llama 3.1 8B": llama_8b}


def main() -> None:
    rows = [planned(*case) for case in fresh(_CASES)]
    devices = sorted({device for _, device, *_ in _CASES})
    title = "recomputation within the memory of the device minus the weights"
    report("host_tier", title, rows, rates_of(*devices))


def planned(name: str, device: str, count: int, microbatches: int | None) -> dict[str, Any]:
    """One model, without the host and with it."""
    model = _MODELS[name]()
    tokens = torch.empty(count, 4096, dtype=torch.long, device="meta")
    plans, seconds = [], []
    for room in (0, None):
        torch._dynamo.reset()
        start = time.process_time()
        plans.append(
            roundpipe_fx.plan(
                model,
                device=device,
                host_budget=room,
                num_microbatches=microbatches,
                input_ids=tokens,
                labels=tokens,
            )
        )
        seconds.append(time.process_time() - start)
    without, with_host = plans
    steps = [_step_seconds(plan) for plan in plans]
    times = microbatches or 1
    return {
        "model": name,
        "device": device,
        "rows": count,
        "microbatches": times,
        "budget GiB": round(without.budget / 2**30, 1),
        "recomputed s": round(times * without.recompute_seconds, 3),
        "with the host s": round(times * with_host.recompute_seconds, 3),
        "on the host GiB": round(with_host.host_bytes / 2**30, 1),
        "step s": round(steps[0], 3),
        "with the host": round(steps[1], 3),
        "ratio": round(steps[1] / steps[0], 3),
        "CPU s to plan": round(seconds[0], 1),
        "with the host, CPU s": round(seconds[1], 1),
    }


def _step_seconds(plan: roundpipe_fx.Plan) -> float:
    """Modelled seconds of a step."""
    if plan.pipeline is not None:
        return plan.pipeline.makespan
    return sum(stage.forward_seconds + stage.recompute_seconds + stage.backward_seconds for stage in plan.stages)


if __name__ == "__main__":
    main()
