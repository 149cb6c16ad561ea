"""Processor seconds of a step with stages compiled by Inductor, beside ``torch.compile``, in turns.

python -m benchmarks.inductor_steps                                  # all models, without a budget: takes long
python -m benchmarks.inductor_steps --models ResNet "GPT-2, 1 K words"
python -m benchmarks.inductor_steps --models ResNet --peers "torch.compile 0.5" "torch.compile 0.2"

Each model is compiled both ways in one process, with one thread and an allocator that keeps what is freed. The ways
take turns, so that what else the machine does slows both; a ratio is the median over rounds. Beside a peer with a
budget, ours has for its budget the bytes that this peer is measured to need.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.inductor import WAYS, Way, cases, compiled_by_us
from benchmarks.resident import in_a_process, keep_freed_memory
from benchmarks.side_by_side import RESULTS, Case, build, give_own_code, paired, report, step

_PEER = "torch.compile"
_PEERS = [way for way in WAYS if way.startswith(_PEER)]
_MOST_ROUNDS, _MOST_SECONDS = 100, 60.0
"""Rounds, and seconds that they take together, at most."""


def main() -> None:
    parser = argparse.ArgumentParser()
    by_name = {case.name: case for case in cases()}
    parser.add_argument("--models", nargs="*", default=[*by_name], choices=[*by_name], metavar="MODEL")
    parser.add_argument("--peers", nargs="*", default=[_PEER], choices=_PEERS, metavar="PEER")
    parser.add_argument("--one", nargs=2)
    parser.add_argument("--bytes", type=int)
    asked = parser.parse_args()
    if asked.one:
        name, peer = asked.one
        print(json.dumps(measured(by_name[name], peer, asked.bytes)))
        return
    path = RESULTS / "inductor_steps.json"
    stored = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {(row["model"], row["peer"]): row for row in stored}
    for name in asked.models:
        for peer in asked.peers:
            row = _row(name, peer)
            if isinstance(row, str):
                print(f"{name}, {peer}: {row}", file=sys.stderr, flush=True)
                continue
            rows[name, peer] = row
            ordered = [rows[key] for key in ((model, way) for way in _PEERS for model in by_name) if key in rows]
            report("inductor_steps", "processor seconds of a step, in turns", ordered)


def _row(name: str, peer: str) -> dict[str, Any] | str:
    """Figures of a model beside a peer, or why there are none."""
    row: dict[str, Any] = {"model": name, "peer": peer, "bytes of both, MB": ""}
    arguments = ["--one", name, peer]
    if peer != _PEER:
        alone = in_a_process("inductor", "--one", name, peer)
        if isinstance(alone, str):
            return alone
        row["bytes of both, MB"] = alone["bytes"] / 1e6
        arguments += ["--bytes", str(alone["bytes"])]
    figures = in_a_process("inductor_steps", *arguments)
    return figures if isinstance(figures, str) else row | figures


def measured(case: Case, peer: str, budget: int | None) -> dict[str, float | str]:
    """Seconds of both ways and their ratio, in this process.

    Args:
        case: the model and its batch.
        budget: of ours, in bytes.
    """
    torch.set_num_threads(1)
    clocks = {"peer s": _make_clock(case, WAYS[peer]), "ours s": _make_clock(case, compiled_by_us(budget))}
    keep_freed_memory()
    begin = time.perf_counter()
    for clock in clocks.values():
        clock()
    # Each clock runs twice a round.
    rounds = int(_MOST_SECONDS / (2 * (time.perf_counter() - begin)))
    seconds = paired(clocks, min(max(rounds, 5), _MOST_ROUNDS))
    low, ratio, high = statistics.quantiles([took["ours s"] / took["peer s"] for took in seconds], n=4)
    medians = {way: statistics.median(took[way] for took in seconds) for way in clocks}
    return {**medians, "ratio": ratio, "quartiles": f"{low:.3f} {high:.3f}", "rounds": len(seconds)}


def _make_clock(case: Case, way: Way) -> Callable[[], float]:
    """Compile a model, and return what times a step of it."""
    model, batch = build(case), case.make_batch()
    give_own_code(model)
    run = way(model, case)
    for _ in range(4):  # in the first ones plans are made
        step(run, model, batch)

    def clock() -> float:
        begin = time.process_time()
        step(run, model, batch)
        return time.process_time() - begin

    return clock


if __name__ == "__main__":
    main()
