"""CPU seconds of the first step, tracing and compiling included, beside ``torch.compile(backend="aot_eager")``.

python -m benchmarks.first_step [--rounds N]

A GPT-2 of 12 layers and width 256. Each way runs in processes of its own, in turns; nothing is read from a cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import transformers
from torch import nn

import roundpipe_fx
from benchmarks.side_by_side import report

WAYS: dict[str, dict[str, Any] | None] = {
    "aot_eager": None,
    "roundpipe_fx": {},
    "roundpipe_fx, memory_budget=0.5": {"memory_budget": 0.5},
}


def one(way: str) -> float:
    """CPU seconds of the first step in this process."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=12, n_embd=256, n_head=4, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(config.vocab_size, (2, 64))
    options = WAYS[way]
    compiled: nn.Module = (
        torch.compile(model, backend="aot_eager") if options is None else roundpipe_fx.compile(model, **options)  # type: ignore[assignment]
    )
    start = time.process_time()
    compiled(input_ids=tokens, labels=tokens).loss.backward()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", choices=WAYS, help="run one way in this process, and print the seconds")
    arguments = parser.parse_args()
    if arguments.one:
        print(one(arguments.one))
        return
    environment = {**os.environ, "ROUNDPIPE_FX_PLAN_CACHE": "0"}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way, found in seconds.items():
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.first_step", "--one", way]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found.append(float(done.stdout.split()[-1]))
    beside = seconds["aot_eager"]
    rows = [
        {
            "a GPT-2 of 12 layers": way,
            "CPU s": statistics.median(found),
            "ratio to aot_eager": statistics.median(own / other for own, other in zip(found, beside, strict=True)),
        }
        for way, found in seconds.items()
    ]
    report("first_step", "the first step", rows)


if __name__ == "__main__":
    main()
