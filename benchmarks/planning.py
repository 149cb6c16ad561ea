"""Seconds that planning within a byte budget takes, beside those of Dynamo and AOTAutograd, by depth.

python -m benchmarks.planning

Planning is measuring what kernels need for themselves, reading the operations off the graph and searching; the budget
is a share, so that the whole trade-off is searched. The graph of 10,000 forward nodes is a GPT-2 deep enough. The 8B
Llama is planned on the meta device.

A second table has the CPU seconds of all passes, planning and emission in a new process, without the plan cache and
with the plan in it.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import roundpipe_fx
from benchmarks.models import llama_8b
from benchmarks.side_by_side import build, cases, fresh, report
from roundpipe_fx.api import on_one_device
from roundpipe_fx.compiler import operations_in_tiles
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.passes import pipeline
from roundpipe_fx.planner import program_within_budget as within_budget

_RUNS = 3
"""Of so many runs the one in the middle is shown."""
_PROCESSES = 3
_SHALLOW = {"width": 32, "batch": 2, "length": 16}


class _Spent:
    """Seconds by part, of the functions that are wrapped."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.nodes = 0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if isinstance(args[0], JointGraph) and part == "lower":
                self.nodes = sum(node.meta.get("partitioner_tag") == "is_forward" for node in args[0].computed())
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return run


def main() -> None:
    os.environ["ROUNDPIPE_FX_PLAN_CACHE"] = "0"
    spent = _Spent()
    on_one_device.lower = spent.timed("lower", on_one_device.lower)
    operations_in_tiles.read_operations = spent.timed("planning", operations_in_tiles.read_operations)
    within_budget.choose = spent.timed("planning", within_budget.choose)
    pipeline.mark_workspaces = spent.timed("planning", pipeline.mark_workspaces)
    operations_in_tiles.common_subexpressions = spent.timed("planning", operations_in_tiles.common_subexpressions)
    pipeline.eliminate_common_subexpressions = spent.timed("planning", pipeline.eliminate_common_subexpressions)
    rows = []
    _trace(spent, "warm-up", *_case("GPT-2", 2))
    for name in ("GPT-2", "Llama", "T5"):
        for layers in (12, 24, 48):
            runs = [_trace(spent, f"{name}, {layers} layers", *_case(name, layers)) for _ in fresh([None] * _RUNS)]
            rows.append(sorted(runs, key=lambda row: row["ratio"])[_RUNS // 2])
    for layers in fresh([170]):
        rows.append(_trace(spent, f"GPT-2, {layers} layers", *_case("GPT-2", layers)))
    rows.append(_large(spent))
    report("planning", "planning (targets: ratio at most 0.1 to 48 layers; 10,000 nodes 5 s; 8B 120 s in all)", rows)
    torch._dynamo.reset()
    plan_cache()


def plan_cache() -> None:
    """Seconds of lowering in new processes, one after another, without the plan cache and with the plan in it."""
    rows = []
    for name in ("GPT-2", "Llama", "T5"):
        with tempfile.TemporaryDirectory() as folder:
            on = {"ROUNDPIPE_FX_CACHE": folder, "ROUNDPIPE_FX_PLAN_CACHE": "1"}
            off = {"ROUNDPIPE_FX_PLAN_CACHE": "0"}
            _process(name, on)  # writes the plan
            pairs = [(_process(name, on), _process(name, off)) for _ in range(_PROCESSES)]
        ratios = sorted(cached / planned for cached, planned in pairs)
        rows.append(
            {
                "model": f"{name}, 12 layers",
                "planned s": statistics.median(planned for _, planned in pairs),
                "from the cache s": statistics.median(cached for cached, _ in pairs),
                "median ratio": statistics.median(ratios),
                "least and largest": f"{ratios[0]:.3f} {ratios[-1]:.3f}",
            }
        )
    report("plan_cache", "lowering in a new process, CPU s (target: ratio at most 0.5)", rows)


def _process(name: str, environment: dict[str, str]) -> float:
    code = f"from benchmarks.planning import print_lowering_seconds\nprint_lowering_seconds({name!r})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, check=True, env={**os.environ, **environment}, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def print_lowering_seconds(name: str) -> None:
    """Run in a process of its own."""
    torch.set_num_threads(1)
    seconds: list[float] = []
    lowering = on_one_device.lower

    def timed(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        start = time.process_time()
        lowered = lowering(*args, **kwargs)
        seconds.append(time.process_time() - start)
        return lowered

    on_one_device.lower = timed
    model, batch = _case(name, 12)
    roundpipe_fx.compile(model, memory_budget=0.3, fullgraph=True).trace(**batch)
    print(sum(seconds))


def _case(name: str, layers: int) -> tuple[nn.Module, dict[str, Any]]:
    if name == "Llama":
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        tokens = torch.randint(128, (2, 16))
        return transformers.LlamaForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}
    case = next(case for case in cases(layers=layers, **_SHALLOW) if case.name.startswith(name))
    return build(case), case.make_batch()


def _trace(spent: _Spent, name: str, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    compiled = roundpipe_fx.compile(model, memory_budget=0.3, fullgraph=True)
    gc.collect()
    spent.seconds.clear()
    start = time.perf_counter()
    compiled.trace(**batch)
    return _row(spent, name, time.perf_counter() - start)


def _row(spent: _Spent, name: str, total: float) -> dict[str, Any]:
    captured = total - spent.seconds["lower"]
    return {
        "model": name,
        "forward nodes": spent.nodes,
        "Dynamo, AOTAutograd s": captured,
        "planning s": spent.seconds["planning"],
        "ratio": spent.seconds["planning"] / captured,
        "planning ms per 1000 nodes": 1e6 * spent.seconds["planning"] / spent.nodes,
        "in all s": total,
    }


def _large(spent: _Spent) -> dict[str, Any]:
    model = llama_8b()
    tokens = torch.empty(1, 4096, dtype=torch.long, device="meta")
    spent.seconds.clear()
    start = time.perf_counter()
    roundpipe_fx.plan(model, input_ids=tokens, labels=tokens, device="H200", memory_budget=0.3)
    return _row(spent, "Llama 8B on meta", time.perf_counter() - start)


if __name__ == "__main__":
    main()
