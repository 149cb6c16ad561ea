"""Which operators planning runs on made-up operands: in Hugging Face's architectures, and in the fuzzer's pool.

python -m benchmarks.made_up_operands               # all: takes an hour
python -m benchmarks.made_up_operands pool          # the fuzzer's pool
python -m benchmarks.made_up_operands 100           # so many architectures

Small models are compiled on the CPU, and their forward runs. Each operator that planning runs alone must be named in
:mod:`roundpipe_fx.analysis.cost.operand_rules`, with operands within its rules; the others are listed, as what steps
have to show.
"""

from __future__ import annotations

import functools
import itertools
import logging
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import roundpipe_fx
from benchmarks.fuzz.case import Case, Element
from benchmarks.fuzz.operations import BODIES, KINDS
from benchmarks.fuzz.program import write_program
from benchmarks.fuzz.references import module_of
from benchmarks.small_models import TASKS, architectures, small_batch, small_model
from roundpipe_fx.analysis.cost import measured, operand_rules, probe, real_layout, synthetic
from roundpipe_fx.api import on_one_device
from roundpipe_fx.ir.joint_graph import Mark

__all__ = ["Watch", "architecture_cases", "pool_cases"]

ModelCase = tuple[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]]
_PATIENCE = 120
"""Seconds for one model."""


class Watch:
    """Context manager that records which operators planning runs alone.

    Attributes:
        ran: how often, by operator.
        unnamed: those that the list does not name, or with operands that it does not accept.
        untried: operators whose workspace steps must show.
        graphs: number of graphs that were planned.
    """

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.untried: Counter[str] = Counter()
        self.unnamed: set[str] = set()
        self.graphs = 0

    def __enter__(self) -> Watch:
        self._run, self._lower = synthetic.run_alone, on_one_device.lower
        for module in (probe, real_layout, measured):
            module.run_alone = self._ran  # type: ignore[attr-defined]
        on_one_device.lower = self._lowered
        return self

    def __exit__(self, *_: object) -> None:
        for module in (probe, real_layout, measured):
            module.run_alone = self._run  # type: ignore[attr-defined]
        on_one_device.lower = self._lower

    def _ran(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.ran[str(target)] += 1
        if operand_rules.kinds_of_call(target, operand_rules.arguments_of(target, args, kwargs)) is None:
            self.unnamed.add(str(target))
        return self._run(target, args, kwargs)

    def _lowered(self, joint: Any, *args: Any, **kwargs: Any) -> Any:
        self.graphs += 1
        lowered = self._lower(joint, *args, **kwargs)
        self.untried.update(str(node.target) for node in joint.computed() if Mark.UNTRIED in node.meta)
        return lowered


def pool_cases(each: int = 6) -> Iterator[ModelCase]:
    """Programs that together have every kind of the fuzzer's pool.

    Args:
        each: number of kinds in a program.
    """
    names = sorted(KINDS)
    for start in range(0, len(names), each):
        kinds = tuple(names[start : start + each])
        yield ", ".join(kinds), functools.partial(_program, kinds)


def _program(kinds: tuple[str, ...]) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    elements = tuple(
        Element(i, kind, 1000 + i, (Element(100 * (i + 1), "tanh", 7),) if kind in BODIES else ())
        for i, kind in enumerate(kinds)
    )
    case = Case(0, 0, elements, "float32", (6, 4), ((3, 8),), "loss", False, ({"mode": "step"},))
    program = write_program(case, KINDS)
    return module_of(program)(), tuple(program.inputs(6, 0)), {}


def architecture_cases() -> Iterator[ModelCase]:
    """Small models of Hugging Face's architectures, of the tasks in turn."""
    by_task = [[(task, name) for name in architectures(task)] for task in TASKS]
    for task, name in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*by_task))):
        yield f"{task}/{name}", functools.partial(_architecture, task, name)


def _architecture(task: str, name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model, config = small_model(task, name)
    return model, (), small_batch(task, config)


def main() -> None:
    """Compile, and print what was run."""
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    asked = sys.argv[1:] or ["pool", "100000"]
    watch = Watch()
    for word in asked:
        cases, most = (pool_cases(), len(KINDS)) if word == "pool" else (architecture_cases(), int(word))
        planned = 0
        for name, make in cases:
            if planned >= most:
                break
            outcome = _plan(watch, make)
            planned += not outcome
            print(f"{planned} {name}: {outcome or 'planned'}", *sorted(watch.unnamed), flush=True)
        print(f"{word}: {planned} planned, {watch.graphs} graphs, {sum(watch.ran.values())} runs alone", flush=True)
    print("run alone:", *sorted(watch.ran))
    print("steps must show:", *sorted(watch.untried))
    print("run, and not accepted:", *sorted(watch.unnamed))
    sys.exit(bool(watch.unnamed))


def _plan(watch: Watch, make: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]) -> str:
    """Why a model was not planned; empty if it was."""
    torch._dynamo.reset()
    before = watch.graphs
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(_PATIENCE)
    try:
        model, args, kwargs = make()
        with watch:
            roundpipe_fx.compile(model)(*args, **kwargs)
    except Exception as error:  # whatever a model has against being small
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    finally:
        signal.alarm(0)
    return "" if watch.graphs > before else "no graph"


def _stop(*_: object) -> None:
    raise TimeoutError


if __name__ == "__main__":
    main()
