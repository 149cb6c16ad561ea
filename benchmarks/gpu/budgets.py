"""Budget honesty: bytes that steps allocate beside those that were planned and those that were allowed.

Budgets are fractions, bytes, and the least that the error of a budget of one byte names, with and without tiles. Each
is held against the second step or a later one: the first learns what the caller keeps of the outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import roundpipe_fx
from benchmarks import inductor
from benchmarks.gpu.measurement import Measurement, Row, Sizes, allocated_and_reserved
from benchmarks.side_by_side import Case, build, cases, heavy_cases, step

PART = "budgets"
_STEPS = 3
"""Steps before the one that is measured."""


def measurements(sizes: Sizes) -> list[Measurement]:
    """A measurement a model: bytes alone, so other processes may use the device."""
    return [
        Measurement(f"budgets of {case.name}", functools.partial(_rows, case), timed=False)
        for case in budget_cases(sizes)
    ]


def budget_cases(sizes: Sizes) -> list[Case]:
    """The models, small enough for many plans in little time."""
    if sizes.budget_width < 128:
        return cases(layers=2, width=sizes.budget_width, batch=2, length=16)[: sizes.budget_models]
    experts = [case for case in cases(layers=4, width=sizes.budget_width) if case.name == "Qwen3-MoE bf16"]
    dropout = [case for case in inductor.cases() if case.name == "MLP with dropout"]
    return [*heavy_cases(), *experts, *dropout][: sizes.budget_models]


def _rows(case: Case, *_: Any) -> Iterator[Row]:
    planned = {}
    for fraction in (0.0, 0.3, 1.0):
        row = _compiled(case, str(fraction), "eager", memory_budget=fraction, tiling="never")
        planned[fraction] = row["planned bytes"]
        yield row
    between = (planned[0.0] + planned[1.0]) // 2
    yield _compiled(case, "bytes", "eager", memory_budget=between, tiling="never")
    for tiling in ("never", "auto"):
        yield _compiled(case, "least", "eager", memory_budget=_least(case, tiling), tiling=tiling)
    yield _in_place(case, 0.3)
    for fraction in (0.0, 0.3):
        yield _compiled(case, str(fraction), "inductor", memory_budget=fraction, tiling="never")


def _model(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    torch._dynamo.reset()
    return build(case).cuda(), {name: value.cuda() for name, value in case.make_batch().items()}


def _compiled(case: Case, asked: str, stages: str, **options: Any) -> Row:
    model, batch = _model(case)
    compiled = roundpipe_fx.compile(model, stage_compiler=stages, **options)
    figures = _measured(lambda: step(compiled, model, batch), model, lambda: compiled.plan)
    return {"part": PART, "model": case.name, "stages": stages, "budget": asked, "tiling": options["tiling"], **figures}


def _in_place(case: Case, fraction: float) -> Row:
    model, batch = _model(case)
    options = {"memory_budget": fraction, "stage_compiler": "eager", "tiling": "never"}
    model.compile(backend="roundpipe_fx", options=options)
    figures = _measured(lambda: step(model, model, batch), model, lambda: roundpipe_fx.plans(model)[-1])
    row = {"part": PART, "model": case.name, "stages": "eager, in place", "budget": str(fraction), "tiling": "never"}
    return {**row, **figures}


def _measured(run: Callable[[], Any], model: nn.Module, plan: Callable[[], roundpipe_fx.Plan]) -> Row:
    for _ in range(_STEPS):
        run()
    peak, reserved = allocated_and_reserved(model, run)
    budget, predicted = plan().budget, plan().peak_bytes
    assert budget is not None
    return {
        "budget bytes": budget,
        "planned bytes": predicted,
        "measured bytes": peak,
        "reserved bytes": reserved,
        "measured / planned": peak / predicted,
        "within": "yes" if peak <= budget else "no",
    }


def _least(case: Case, tiling: str) -> int:
    """The least budget that the refusal of a budget of one byte names."""
    model, batch = _model(case)
    try:
        roundpipe_fx.compile(model, memory_budget=1, tiling=tiling, stage_compiler="eager").trace(**batch)
    except roundpipe_fx.InfeasibleBudgetError as error:
        return error.minimum
    raise AssertionError("a step was planned within one byte")
