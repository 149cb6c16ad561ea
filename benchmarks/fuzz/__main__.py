"""Run the fuzzer: see :mod:`benchmarks.fuzz`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from benchmarks.fuzz.case import FEATURES, Case, draw_case
from benchmarks.fuzz.check import Failure, Result, check_case
from benchmarks.fuzz.operations import BODIES, KINDS, WEIGHTS
from benchmarks.fuzz.options import describe, draw_ways
from benchmarks.fuzz.reduce import reduced, script
from benchmarks.fuzz.workers import run_all

_PATIENCE = 120.0
"""Seconds of a processor for one way of one case."""


def case_of(seed: int, number: int, most: int = 60, ways: int = 3, among: Collection[str] = FEATURES) -> Case:
    """A case of a run, with its ways; ``among``: those of :data:`FEATURES` that it may have."""
    case = draw_case(seed, number, WEIGHTS, BODIES, most, among)
    return dataclasses.replace(case, ways=draw_ways(seed, number, ways, among))


def main() -> int:
    """Run cases, reduce what fails, print what was done."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description="random programs, random options")
    parser.add_argument("--cases", type=int, default=100, help="how many programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one of the seed's")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the number of the first")
    parser.add_argument("--minutes", type=float, help="begin no case after so many minutes")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--most", type=int, default=60, help="operations in a program, at most")
    parser.add_argument("--without", nargs="*", default=[], choices=FEATURES, help="what no case may have")
    parser.add_argument("--reduce", type=float, default=120.0, help="seconds to make a failing case smaller; 0: never")
    parser.add_argument("--out", type=Path, help="a folder for what fails, as programs")
    parser.add_argument("--show", action="store_true", help="print the programs")
    given = parser.parse_args()
    numbers = [given.case] if given.case is not None else range(given.first, given.first + given.cases)
    begin = time.monotonic()

    def cases() -> Iterator[Case]:
        for number in numbers:
            if given.minutes is not None and time.monotonic() - begin > 60 * given.minutes:
                return
            yield case_of(given.seed, number, given.most, among=set(FEATURES) - set(given.without))

    checks: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    failed: list[tuple[Case, Failure]] = []
    ran = differs = 0
    for case, result, stopped in run_all(cases(), check_case, given.jobs, _PATIENCE):
        ran += 1
        if result is None:
            way = next((way for way in case.ways if describe(way) in stopped), None)
            result = Result()
            if way is None:
                result.skipped.append(stopped)
            else:
                result.failures.append(Failure("hung" if stopped.startswith("hung") else "died", way, stopped))
        checks += result.checks
        kinds.update(set(result.kinds))
        skipped.update(reason.split(":")[0] + ":" + reason.partition(":")[2][:50] for reason in result.skipped)
        differs += result.reference_differs
        if given.show:
            from benchmarks.fuzz.program import write_program

            print(write_program(case, KINDS).source)
        for failure in result.failures:
            print(f"case {case.number}: {failure.kind} with {describe(failure.way)}\n  {failure.text}", flush=True)
        failed += [(case, failure) for failure in _distinct(result.failures)]
        if ran % 20 == 0:
            spent = time.monotonic() - begin
            print(f"{ran} cases, {checks.total()} checks, {len(failed)} failures, {spent / 60:.1f} minutes", flush=True)
    spent = time.monotonic() - begin
    for case, failure in failed:
        _show_smallest(case, failure, given.reduce, given.out)
    print(f"\n{ran} cases, {checks.total()} checks, {len(failed)} failures in {spent / 60:.1f} minutes")
    print(f"{len(kinds)} of {len(KINDS)} kinds of operations; aot_eager differed from eager in {differs} cases")
    for name, count in checks.most_common():
        wrong = sum(failure.kind == name for _, failure in failed)
        print(f"  {count:6d} {name}" + (f", {wrong} failed" if wrong else ""))
    if skipped:
        print(f"not tried: {skipped.total()}")
        for reason, count in skipped.most_common(12):
            print(f"  {count:6d} {reason}")
    return bool(failed)


def _distinct(failures: list[Failure]) -> list[Failure]:
    """The first of each kind: other ways mostly fail for the same reason, and where outputs differ so does the rest."""
    found: dict[str, Failure] = {}
    for failure in failures:
        kind = "values" if failure.kind in ("outputs", "loss", "gradients", "buffers") else failure.kind
        found.setdefault(kind, failure)
    return list(found.values())


def _show_smallest(case: Case, failure: Failure, seconds: float, out: Path | None) -> None:
    def fails(smaller: Case) -> Failure | None:
        for _, result, stopped in run_all(iter([smaller]), check_case, 1, _PATIENCE):
            if result is None:
                same = failure.kind == ("hung" if stopped.startswith("hung") else "died")
                return dataclasses.replace(failure, way=smaller.ways[0], text=stopped) if same else None
            return next((own for own in result.failures if own.is_like(failure)), None)
        return None

    small, found = case, failure
    if seconds:
        small, found = reduced(case, failure, _in_one_process(fails, failure), seconds)
    text = script(dataclasses.replace(small, ways=(found.way,)), found)
    print(f"\n{'-' * 100}\n{text}", flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        name = f"{case.seed}_{case.number}_{failure.kind.replace(' ', '_').replace(',', '')}.py"
        (out / name).write_text(text)


def _in_one_process(fails: Callable[[Case], Failure | None], failure: Failure) -> Callable[[Case], Failure | None]:
    """Run here what cannot hang: a process for each attempt takes longer than the attempt."""
    if failure.kind in ("hung", "died"):
        return fails

    def here(smaller: Case) -> Failure | None:
        result = check_case(smaller)
        return next((own for own in result.failures if own.is_like(failure)), None)

    return here


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.exit(main())
