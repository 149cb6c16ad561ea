"""CPU seconds of the first step, tracing and compiling included, beside ``torch.compile`` with the same compiler.

python -m benchmarks.first_step [--rounds N] [--layers N]

A GPT-2 of width 256, with eager stages beside ``backend="aot_eager"`` and with compiled ones beside Inductor. Each way
runs in processes of its own, in turns; nothing is read from a cache, and Inductor compiles with one thread. Where the
planner judges plans by the code that Inductor writes, the same runs once more with the plan kept on the disk, but
nothing compiled: what that saves is what planning took.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import torch
import transformers

import roundpipe_fx
from benchmarks.resident import cpu_seconds
from benchmarks.side_by_side import report

WAYS: dict[str, dict[str, Any] | str] = {
    "aot_eager": "aot_eager",
    "roundpipe_fx": {},
    "roundpipe_fx, memory_budget=0.5": {"memory_budget": 0.5},
    "torch.compile": "inductor",
    "roundpipe_fx, Inductor": {"stage_compiler": "inductor"},
    "roundpipe_fx, Inductor, memory_budget=0.5": {"stage_compiler": "inductor", "memory_budget": 0.5},
}
"""Options of ours, or the backend of PyTorch's, which those below it are compared with."""


_PLANNED = "roundpipe_fx, Inductor, memory_budget=0.5"
"""The way whose planner judges plans by code."""


def one(way: str, layers: int) -> float:
    """CPU seconds of the first step in this process and those that it starts."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=layers, n_embd=256, n_head=4, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(config.vocab_size, (2, 64))
    options = WAYS[way]
    compiled: Any = (
        torch.compile(model, backend=options) if isinstance(options, str) else roundpipe_fx.compile(model, **options)
    )
    start = cpu_seconds()
    compiled(input_ids=tokens, labels=tokens).loss.backward()
    return cpu_seconds() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--one", choices=WAYS, help="run one way in this process, and print the seconds")
    arguments = parser.parse_args()
    if arguments.one:
        print(one(arguments.one, arguments.layers))
        return
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with_plan: list[float] = []
    for _ in range(arguments.rounds):
        for way, measured in seconds.items():
            with tempfile.TemporaryDirectory() as plans:
                measured.append(_in_a_process(way, arguments.layers, plans))
                if way == _PLANNED:
                    with_plan.append(_in_a_process(way, arguments.layers, plans))
    rows, peer = [], ""
    for way, measured in seconds.items():
        peer = way if isinstance(WAYS[way], str) else peer
        ratios = [mine / other for mine, other in zip(measured, seconds[peer], strict=True)]
        planning = [whole / rest - 1 for whole, rest in zip(measured, with_plan, strict=True)]
        rows.append(
            {
                f"a GPT-2 of {arguments.layers} layers": way,
                "CPU s": statistics.median(measured),
                "ratio": statistics.median(ratios),
                "to": peer,
                "planning ÷ the same with a kept plan": statistics.median(planning) if way == _PLANNED else "",
            }
        )
    name = "first_step" if arguments.layers == 12 else f"first_step_{arguments.layers}_layers"
    report(name, f"the first step, {arguments.layers} layers", rows)


def _in_a_process(way: str, layers: int, plans: str) -> float:
    """CPU seconds of a way, where nothing is compiled yet, and a folder has its plan, or gets it."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.first_step", "--one", way, "--layers", str(layers)]
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "ROUNDPIPE_FX_CACHE": plans, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
