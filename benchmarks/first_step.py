"""CPU seconds of the first step, tracing and compiling included, beside ``torch.compile`` with the same compiler.

python -m benchmarks.first_step [--rounds N] [--layers N]

A GPT-2 of width 256, with eager stages beside ``backend="aot_eager"`` and with compiled ones beside Inductor. Each way
runs in processes of its own, in turns; nothing is read from a cache, and Inductor compiles with one thread.
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
from roundpipe_fx.planner import lower

WAYS: dict[str, dict[str, Any] | str] = {
    "aot_eager": "aot_eager",
    "roundpipe_fx": {},
    "roundpipe_fx, memory_budget=0.5": {"memory_budget": 0.5},
    "torch.compile": "inductor",
    "roundpipe_fx, Inductor": {"stage_compiler": "inductor"},
    "roundpipe_fx, Inductor, memory_budget=0.5": {"stage_compiler": "inductor", "memory_budget": 0.5},
}
"""Options of ours, or the backend of PyTorch's, which those below it are compared with."""


def one(way: str, layers: int) -> tuple[float, float]:
    """CPU seconds of the first step in this process and those that it starts, and of planning for the compiler's code
    among them."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=layers, n_embd=256, n_head=4, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(config.vocab_size, (2, 64))
    options = WAYS[way]
    compiled: Any = (
        torch.compile(model, backend=options) if isinstance(options, str) else roundpipe_fx.compile(model, **options)
    )
    planning: list[float] = []
    search = lower.search_by_code

    def timed(*arguments: Any) -> Any:
        begin = cpu_seconds()
        plan = search(*arguments)
        planning.append(cpu_seconds() - begin)
        return plan

    lower.search_by_code = timed
    start = cpu_seconds()
    compiled(input_ids=tokens, labels=tokens).loss.backward()
    return cpu_seconds() - start, sum(planning)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--one", choices=WAYS, help="run one way in this process, and print the seconds")
    arguments = parser.parse_args()
    if arguments.one:
        print(*one(arguments.one, arguments.layers))
        return
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    planning: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way, measured in seconds.items():
            whole, part = _in_a_process(way, arguments.layers)
            measured.append(whole)
            planning[way].append(part)
    rows, peer = [], ""
    for way, measured in seconds.items():
        peer = way if isinstance(WAYS[way], str) else peer
        ratios = [mine / other for mine, other in zip(measured, seconds[peer], strict=True)]
        rows.append(
            {
                f"a GPT-2 of {arguments.layers} layers": way,
                "CPU s": statistics.median(measured),
                "ratio": statistics.median(ratios),
                "to": peer,
                # Of what is left, tracing included; the chosen plan's code is written once, while planning.
                "planning for code ÷ rest": statistics.median(
                    part / (whole - part) for whole, part in zip(measured, planning[way], strict=True)
                )
                or "",
            }
        )
    name = "first_step" if arguments.layers == 12 else f"first_step_{arguments.layers}_layers"
    report(name, f"the first step, {arguments.layers} layers", rows)


def _in_a_process(way: str, layers: int) -> tuple[float, float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.first_step", "--one", way, "--layers", str(layers)]
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "ROUNDPIPE_FX_CACHE": folder, "ROUNDPIPE_FX_PLAN_CACHE": "0"}
        environment = {**os.environ, **caches, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    whole, part = done.stdout.split()[-2:]
    return float(whole), float(part)


if __name__ == "__main__":
    main()
