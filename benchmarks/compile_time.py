"""Seconds that passes and codegen add to the time of Dynamo and AOTAutograd, by depth.

python -m benchmarks.compile_time
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

import roundpipe_fx
from benchmarks.side_by_side import build, cases, fresh, report, step
from roundpipe_fx.api import on_one_device


def main() -> None:
    spent = {"ours": 0.0}

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent["ours"] += time.perf_counter() - start

        return run

    on_one_device.lower = timed(on_one_device.lower)
    on_one_device.OnOneDevice._load = timed(on_one_device.OnOneDevice._load)  # type: ignore[method-assign]
    rows = []
    first = cases(layers=2, width=32, batch=2, length=16)[0]
    warm = build(first)
    step(roundpipe_fx.compile(warm), warm, first.make_batch())
    for layers in fresh([6, 12, 24, 48]):
        case = cases(layers=layers, width=32, batch=2, length=16)[0]
        model, batch = build(case), case.make_batch()
        compiled = roundpipe_fx.compile(model, stages=6, recompute="full", fullgraph=True)
        gc.collect()
        spent["ours"] = 0.0
        start = time.perf_counter()
        step(compiled, model, batch)
        total = time.perf_counter() - start
        rest = total - spent["ours"]
        rows.append(
            {
                "GPT-2 layers": layers,
                "Dynamo, AOTAutograd, first step s": rest,
                "passes and codegen s": spent["ours"],
                "ratio": spent["ours"] / rest,
                "ms a layer": 1e3 * spent["ours"] / layers,
            }
        )
    report("compile_time", "compile time (target: ratio at most 0.2, about linear in depth)", rows)
    torch._dynamo.reset()


if __name__ == "__main__":
    main()
