"""The command. Everything is measured on the current CUDA device, the most valuable first, a process a measurement:

    python -m benchmarks.gpu                       # as much as eight minutes allow
    python -m benchmarks.gpu --minutes 30          # all
    python -m benchmarks.gpu --only "side by side" budgets

Each row is a line of JSON, printed and appended to ``benchmarks/results/gpu_<card>.jsonl`` as soon as it is known: stop
it whenever you like. ``python -m benchmarks.page`` makes the documentation's tables of the file. Measurements of bytes
run at the same time, and so do those that fill the caches of compiled code; what has seconds is then measured alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from benchmarks.gpu.measurement import FIRST_STEP, FULL, SMALL, Measurement, Row
from benchmarks.gpu.order import MACHINE, groups
from benchmarks.gpu.pool import Pool
from benchmarks.gpu.results import Log, path_of

WORKER = (sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.worker")
_GIB_AT_ONCE, _CORES_AT_ONCE = 30, 4
"""Memory of the device, and cores, for each of the processes that run at the same time."""
_LONGEST = 0.4
"""The fraction of the time that a single measurement may take."""


def main(arguments: Sequence[str] | None = None, worker: Sequence[str] = WORKER) -> None:
    """Measure.

    Args:
        arguments: of the command line; ``None``: this process's.
        worker: command that starts a process for a measurement.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--minutes", type=float, default=8.0, help="when to stop (8)")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="measurements whose names begin so")
    parser.add_argument("--small", action="store_true", help="small models: to test the benchmark itself")
    parser.add_argument("--output", type=Path, help="the file (benchmarks/results/gpu_<card>.jsonl)")
    asked = parser.parse_args(arguments)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        _measure(asked, worker)
    except KeyboardInterrupt:
        print("stopped; the rows above are stored", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _measure(asked: argparse.Namespace, worker: Sequence[str]) -> None:
    deadline = time.monotonic() + 60 * asked.minutes
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "ROUNDPIPE_FX_CACHE": folder}
        environment |= {"HF_HUB_OFFLINE": "1"}

        def pool(spare: int) -> Pool:
            longest = 60 * asked.minutes * _LONGEST
            errors = Path(tempfile.mkdtemp(dir=folder))
            return Pool(worker, spare, deadline=deadline, longest=longest, environment=environment, folder=errors)

        order = {"small": asked.small, "warm": False, "rows": []}
        with pool(1) as first:
            (machine,) = first.measure({**order, "measurement": MACHINE.name})
        if machine["part"] == "failed":
            raise SystemExit(f"no CUDA device can be measured: {machine['error']}")
        at_once = max(1, min(machine["cores"] // _CORES_AT_ONCE, int(machine["memory GiB"]) // _GIB_AT_ONCE))
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, machine["cores"] // at_once))
        log = Log(asked.output or path_of(machine["card"]))
        log.add(machine)
        with ThreadPoolExecutor(at_once) as threads, pool(at_once) as processes:
            for group in groups(SMALL if asked.small else FULL):
                chosen = [item for item in group if not asked.only or item.name.startswith(tuple(asked.only))]
                _measure_group(chosen, small=asked.small, processes=processes, threads=threads, log=log)


def _measure_group(
    group: Sequence[Measurement], *, small: bool, processes: Pool, threads: ThreadPoolExecutor, log: Log
) -> None:
    """First, at once, what has no seconds and what fills caches of compiled code; then what has seconds, one by one."""
    order = {"small": small, "warm": False, "rows": [*log.rows]}

    def store(item: Measurement) -> None:
        for row in processes.measure({**order, "measurement": item.name}):
            log.add(row)

    def compile_code(item: Measurement) -> list[Row]:
        return [*processes.measure({**order, "measurement": item.name, "warm": True})]

    stored = [threads.submit(store, item) for item in group if not item.timed]
    compiled = {item.name: threads.submit(compile_code, item) for item in group if item.timed and item.warmed}
    for future in (*stored, *compiled.values()):
        future.result()
    for item in group:
        if not item.timed:
            continue
        firsts = iter(compiled[item.name].result() if item.warmed else ())
        for row in processes.measure({**order, "measurement": item.name}):
            log.add(with_first_step_of(next(firsts, {}), row))


def with_first_step_of(compiling: Row, row: Row) -> Row:
    """A row with the seconds of the first step that compiled; those of the row itself are with filled caches."""
    if compiling.get(FIRST_STEP) is None or FIRST_STEP not in row:
        return row
    return {**row, FIRST_STEP: compiling[FIRST_STEP]}


if __name__ == "__main__":
    main()
