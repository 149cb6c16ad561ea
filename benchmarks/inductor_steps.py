"""Processor seconds of a step with stages compiled by Inductor and no budget, beside ``torch.compile``, in turns.

python -m benchmarks.inductor_steps                                  # all models: takes long
python -m benchmarks.inductor_steps --models ResNet "GPT-2, 1 K words"

Each model is compiled both ways in one process, with one thread and an allocator that keeps what is freed. The ways
take turns, so that what else the machine does slows both; a ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.inductor import WAYS, cases
from benchmarks.resident import in_a_process, keep_freed_memory
from benchmarks.side_by_side import RESULTS, Case, build, give_own_code, paired, report, step

_PEER, _OURS = "torch.compile", "ours"
_MOST_ROUNDS, _MOST_SECONDS = 100, 60.0
"""Rounds, and seconds that they take together, at most."""


def main() -> None:
    parser = argparse.ArgumentParser()
    by_name = {case.name: case for case in cases()}
    parser.add_argument("--models", nargs="*", default=[*by_name], choices=[*by_name], metavar="MODEL")
    parser.add_argument("--one")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measured(by_name[asked.one])))
        return
    path = RESULTS / "inductor_steps.json"
    rows = {row["model"]: row for row in (json.loads(path.read_text())["rows"] if path.exists() else [])}
    for name in asked.models:
        found = in_a_process("inductor_steps", "--one", name)
        if isinstance(found, str):
            print(f"{name}: {found}", file=sys.stderr, flush=True)
            continue
        rows[name] = {"model": name, **found}
        report("inductor_steps", "processor seconds of a step, in turns", [rows[key] for key in by_name if key in rows])


def measured(case: Case) -> dict[str, float | str]:
    """Seconds of both ways and their ratio, in this process."""
    torch.set_num_threads(1)
    clocks = {way: _make_clock(case, way) for way in (_PEER, _OURS)}
    keep_freed_memory()
    begin = time.perf_counter()
    for clock in clocks.values():
        clock()
    # Each clock runs twice a round.
    rounds = int(_MOST_SECONDS / (2 * (time.perf_counter() - begin)))
    seconds = paired(clocks, min(max(rounds, 5), _MOST_ROUNDS))
    low, ratio, high = statistics.quantiles([took[_OURS] / took[_PEER] for took in seconds], n=4)
    medians = {way: statistics.median(took[way] for took in seconds) for way in clocks}
    return {**medians, "ratio": ratio, "quartiles": f"{low:.3f} {high:.3f}", "rounds": len(seconds)}


def _make_clock(case: Case, way: str) -> Callable[[], float]:
    """Compile a model, and return what times a step of it."""
    model, batch = build(case), case.make_batch()
    give_own_code(model)
    run = WAYS[way](model, case)
    for _ in range(4):  # in the first ones plans are made
        step(run, model, batch)

    def clock() -> float:
        begin = time.process_time()
        step(run, model, batch)
        return time.process_time() - begin

    return clock


if __name__ == "__main__":
    main()
