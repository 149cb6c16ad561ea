"""Alternatives: the pipelines that were simulated for a budget, recorded for the page of the chosen plan.

Each is a graph with thousands of nodes, so none is kept. Their figures, saved values and memory curves are recorded as
plain data when one of them is chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from torch import fx

from roundpipe_fx.compiler.alternative_values import alternative_value, recomputed_nodes, saved_nodes
from roundpipe_fx.ir.alternative_plans import Alternative, Alternatives, AlternativeValue
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline
from roundpipe_fx.pipeline.steps import steps_of
from roundpipe_fx.planner.evaluation import ScheduleEvaluation, with_timing
from roundpipe_fx.schedules import Timing

_PIECES = 240
"""Number of pieces that the curve of a device is given in, at most."""
_PIECES_OF_ALL = 16_384
"""The same for all devices together."""


def with_frontier(
    attempts: Sequence[ScheduleEvaluation], chosen: ScheduleEvaluation, budget: int, allowed: int | None = None
) -> ScheduleEvaluation:
    """The chosen attempt, with the frontier of all, and with the sharded parameters gathered that the budget has room
    for.

    Args:
        attempts: all that were simulated.
        chosen: the one that was chosen.
        budget: bytes that a device may allocate.
        allowed: bytes that the user allows; ``None``: no number was given.
    """
    frontier: list[ScheduleEvaluation] = []
    for attempt in sorted(attempts, key=lambda attempt: (attempt.recompute_seconds, attempt.peak)):
        if not frontier or attempt.peak < frontier[-1].peak:
            frontier.append(attempt)
    pipeline = dataclasses.replace(
        _with_own_modules(chosen),
        budget=budget,
        allowed=allowed,
        trade_off=tuple((attempt.peak, attempt.recompute_seconds) for attempt in frontier),
        alternatives=_alternatives(chosen, frontier),
    )
    return with_timing(chosen, pipeline, pipeline.predict(pipeline.pipelining.microbatches))


def _with_own_modules(attempt: ScheduleEvaluation) -> LoweredPipeline:
    """An attempt's pipeline, in whose stage modules values have its own names."""
    main = attempt.emitted.main
    if attempt.emit is None:
        return attempt.emitted
    lowered = attempt.emit()
    variant = dataclasses.replace(main, lowered=lowered, steps=steps_of(lowered))
    return dataclasses.replace(attempt.emitted, main=variant, last=variant)


def _alternatives(chosen: ScheduleEvaluation, frontier: Sequence[ScheduleEvaluation]) -> Alternatives:
    shown = [*frontier, *([] if any(attempt is chosen for attempt in frontier) else [chosen])]
    numbers: dict[str, int] = {}
    values: list[AlternativeValue] = []

    def indices(nodes: Mapping[str, fx.Node]) -> tuple[int, ...]:
        for name, node in nodes.items():
            if numbers.setdefault(name, len(values)) == len(values):
                values.append(alternative_value(node))
        return tuple(numbers[name] for name in nodes)

    def alternative_of(attempt: ScheduleEvaluation) -> Alternative:
        joint = attempt.emitted.main.lowered.joint
        recomputed = recomputed_nodes(joint)
        return Alternative(
            bytes=attempt.peak,
            seconds=attempt.recompute_seconds,
            curve=(),
            forward=0,
            saved=indices({name: node for name, node in saved_nodes(joint).items() if name not in recomputed}),
            recomputed=indices(recomputed),
            devices=device_curves(attempt.timing),
            makespan=attempt.seconds,
        )

    plans = tuple(map(alternative_of, shown))
    return Alternatives(values=tuple(values), plans=plans, chosen=shown.index(chosen))


def device_curves(timing: Timing) -> tuple[tuple[int, ...], ...]:
    """For each device, the most bytes of the actions that run there in each piece of the step; 0 where it waits."""
    devices = len(timing.ends)
    count = min(_PIECES, max(_PIECES_OF_ALL // max(devices, 1), 1))
    end = max((float(ends[-1]) for ends in timing.ends if len(ends)), default=0.0)
    curves = np.zeros((devices, count), dtype=np.int64)
    if end:
        for curve, *columns in zip(curves, timing.starts, timing.ends, timing.action_bytes, strict=True):
            starts, ends, sizes = columns
            first = np.minimum((starts * (count / end)).astype(np.int64), count - 1)
            last = np.clip(np.ceil(ends * (count / end)).astype(np.int64), first + 1, count)
            lengths = last - first
            # Pieces of all actions one after another: those of an action begin at its first one.
            positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            np.maximum.at(curve, np.repeat(first, lengths) + positions, np.repeat(sizes, lengths))
    return tuple(map(tuple, curves.tolist()))
