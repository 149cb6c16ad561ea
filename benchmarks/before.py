"""Steps, compilation and peaks beside an earlier commit of this repository.

python -m benchmarks.before [COMMIT …] [--pairs N]

Each of the two runs in a process of its own, with the same models, batches and other packages. They take turns: a step
of one, a step of the other; ratios are medians of pairs. Compilation is the CPU seconds of the first step, from Dynamo
to the end of its backward, without plans from the disk.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_COMMITS = ("92ea36c",)
"""Before there was one planner, and plans were made for Inductor's code."""
_CASES = ("GPT-2", "Llama", "T5", "BERT")
_WAYS: dict[str, dict[str, Any]] = {
    "nothing recomputed": {"recompute": "none"},
    "budget 0.3": {"memory_budget": 0.3},
}
_COMPILATIONS = 6
_STEPS = 2
"""Of each pair the last of so many steps counts, as in a loop of its own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("commits", nargs="*", metavar="commit", default=_COMMITS, help="what to compare with")
    parser.add_argument("--pairs", type=int, default=7, help="paired steps of each model and way")
    arguments = parser.parse_args()
    from benchmarks.side_by_side import report

    rows: list[dict[str, Any]] = []
    for commit in arguments.commits:
        with tempfile.TemporaryDirectory() as folder:
            _extract(commit, Path(folder))
            with _worker(Path(folder)) as before, _worker(ROOT) as now:
                for model, way in itertools.product(_CASES, _WAYS):
                    row = _row(before, now, model, way, arguments.pairs)
                    rows.append({"commit": _git("rev-parse", "--short", commit), "model": model, "way": way} | row)
                    report("before", "now / before (targets: steps 1.02, compilation 1.05, no byte more)", rows)


def _row(before: Callable[..., Any], now: Callable[..., Any], model: str, way: str, pairs: int) -> dict[str, Any]:
    spent: list[list[float]] = []
    for _ in range(_COMPILATIONS):
        (old, its), (new, ours) = before("compile", model, way), now("compile", model, way)
        spent.append([old, new])
    for worker in (before, now):
        worker("step")
    steps = [(before("step"), now("step")) for _ in range(pairs)]
    least = [min(found) for found in zip(*spent, strict=True)]
    return {
        "bytes before": its,
        "bytes now": ours,
        "steps": statistics.median(new / old for old, new in steps),
        "compilation": least[1] / least[0],
        "compilation s": least[1],
    }


def _extract(commit: str, folder: Path) -> None:
    """The package as it was at a commit, with its passes where they are imported from."""
    archive = folder / "package.tar"
    _git("archive", "--format=tar", "-o", str(archive), commit, "roundpipe_fx", "passes")
    shutil.unpack_archive(archive, folder)
    passes = folder / "roundpipe_fx" / "passes"
    if not passes.exists():  # commits before the link
        passes.symlink_to(folder / "passes")


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def _worker(folder: Path) -> Iterator[Callable[..., Any]]:
    """A process with the package of a folder; called with a request, it gives the answer."""
    with tempfile.TemporaryDirectory() as cache:
        settings = {"ROUNDPIPE_FX_PLAN_CACHE": "0", "ROUNDPIPE_FX_CACHE": cache, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            (sys.executable, "-W", "ignore", "-c", f"import benchmarks.before as b; b.serve({str(folder)!r})"),
            cwd=ROOT,
            env=os.environ | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def ask(*request: str) -> Any:
            print(json.dumps(request), file=requests, flush=True)
            return json.loads(answers.readline())

        try:
            yield ask
        finally:
            requests.close()
            process.wait()


def serve(folder: str) -> None:
    """Answer requests with the package that is in a folder.

    Args:
        folder: with the package; the benchmarks are those of this checkout.
    """
    if Path(folder) != ROOT:
        sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
        sys.path.insert(0, folder)
    answers = sys.stdout
    sys.stdout = sys.stderr
    import torch

    import roundpipe_fx
    from benchmarks.side_by_side import build, heavy_cases, step

    assert roundpipe_fx.__file__ is not None and Path(roundpipe_fx.__file__).is_relative_to(folder)
    cases = {case.name: case for case in heavy_cases(layers=4)}
    run: Callable[[], Any] = dict
    for line in sys.stdin:
        request, *rest = json.loads(line)
        if request == "compile":
            model, way = rest
            torch._dynamo.reset()
            gc.collect()
            own, batch = build(cases[model]), cases[model].make_batch()
            compiled = roundpipe_fx.compile(own, **_WAYS[way])
            run = lambda: step(compiled, own, batch)  # noqa: B023, E731 - until the next request
            start = time.process_time()
            run()
            answer: Any = (time.process_time() - start, compiled.plan.peak_bytes)
        else:
            for _ in range(_STEPS):
                start = time.perf_counter()
                run()
                answer = time.perf_counter() - start
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
