"""Nanoseconds that the CPU takes to draw a random number, beside those of writing it, with one thread and with all.

python -m benchmarks.drawing
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.side_by_side import report

_NUMBERS = 2**21
_RUNS = 15


def main() -> None:
    threads = torch.get_num_threads()
    shape = torch.full([], False).expand(_NUMBERS)
    values = torch.randn(_NUMBERS)
    rows: list[dict[str, Any]] = []
    for count in (1, threads):
        torch.set_num_threads(count)
        drawn = _nanoseconds(lambda: torch.ops.aten.bernoulli.p(shape, 0.9))
        written = _nanoseconds(lambda: torch.zeros_like(values, dtype=torch.bool).fill_(True))
        rows.append({"threads": count, "bernoulli ns": drawn, "writing a bool ns": written})
    report("drawing", "nanoseconds a number", rows)


def _nanoseconds(run: Callable[[], Any]) -> float:
    taken = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return 1e9 * statistics.median(taken) / _NUMBERS


if __name__ == "__main__":
    main()
