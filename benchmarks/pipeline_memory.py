"""A pipeline's memory: a byte budget beside checkpoints as torchgpipe places them, where stages begin.

python -m benchmarks.pipeline_memory

A Llama of 1.5B parameters on the meta device, planned for 4 devices and 16 microbatches by several schedules. Figures
are of the simulator, which ``tests/pipeline/test_budget.py`` holds to what is measured. Asked is how much lower a
budget gets than ``checkpoint="always"``; what a step costs at the peaks of ``"always"`` and ``"except_last"``; and
what it costs half-way between the lowest peak and that of keeping everything.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import roundpipe_fx
from benchmarks.pipeline import llama, next_word
from benchmarks.side_by_side import report

_DEVICES, _MICROBATCHES = 4, 16


def main() -> None:
    rows: list[dict[str, Any]] = []
    for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"):
        never, except_last, always = (
            _planned(schedule, checkpoint=checkpoint) for checkpoint in ("never", "except_last", "always")
        )
        lowest = _planned(schedule, memory_budget=0.0)
        budgets: dict[str, Any] = {
            "that of 'always'": always["peak bytes"],
            "that of 'except_last'": except_last["peak bytes"],
            "half-way": (never["peak bytes"] + lowest["peak bytes"]) // 2,
        }
        rows += [
            {"budget": f"checkpoint={name!r}", **row}
            for name, row in (("never", never), ("except_last", except_last), ("always", always))
        ]
        rows.append({"budget": "lowest", **lowest, "peak / 'always'": lowest["peak bytes"] / always["peak bytes"]})
        for name, budget in budgets.items():
            row = _planned(schedule, memory_budget=budget)
            assert row["peak bytes"] <= budget
            rows.append({"budget": name, **row, "s / s of 'always'": row["modelled s"] / always["modelled s"]})
    title = f"Llama of 1.5B parameters, {_DEVICES} devices, {_MICROBATCHES} microbatches: a budget beside checkpoints"
    report("pipeline_memory", title, [{key: row.get(key, "") for key in _COLUMNS} for row in rows])


_COLUMNS = (
    "schedule",
    "budget",
    "peak bytes",
    "peak / 'always'",
    "modelled s",
    "s / s of 'always'",
    "recomputed / forward",
    "s to plan",
)


def _planned(schedule: str, **options: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    model, tokens = llama(tied=False)
    compiled = roundpipe_fx.compile(
        model, devices=["cpu"] * _DEVICES, num_microbatches=_MICROBATCHES, schedule=schedule, **options
    )
    began = time.perf_counter()
    plan = compiled.trace(input_ids=tokens, labels=tokens, loss_fn=next_word)
    assert plan.pipeline is not None
    return {
        "schedule": schedule,
        "peak bytes": max(plan.pipeline.peak_bytes),
        "modelled s": plan.pipeline.makespan,
        "recomputed / forward": plan.recompute_seconds / plan.forward_seconds,
        "s to plan": time.perf_counter() - began,
    }


if __name__ == "__main__":
    main()
