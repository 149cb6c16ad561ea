"""Recomputation that fills a pipeline's waits: devices recompute while they wait for incoming gradients.

::

    device 0   F0.0 F0.1 F0.2 ░░ waits ░░ B0.0 with its recomputation
    device 0   F0.0 F0.1 F0.2 R0.0        B0.0               as much of it early as fits the budget
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from roundpipe_fx.planner.evaluation import ScheduleEvaluation
from roundpipe_fx.remat.chain_search import SimulatedSchedule
from roundpipe_fx.remat.choose import Chosen
from roundpipe_fx.remat.early import EarlyChoices, find_early_choices, move_early
from roundpipe_fx.schedules import ActionKind, StageGraph, StepCosts

_LONGER = 1e-9
"""Share of a makespan by which rounding may change it."""
_MOST_FILLED = 3
"""Number of plans for which early recomputation is tried."""
_GRADIENTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)


def fill_waits(
    best: ScheduleEvaluation,
    fitting: Sequence[ScheduleEvaluation],
    attempt: Callable[[SimulatedSchedule], ScheduleEvaluation],
    split: bool,
    microbatches: int,
    limit: int,
) -> ScheduleEvaluation:
    """The quickest step where devices recompute while they wait for gradients; ``best`` if that takes as long.

    A plan that recomputes more may then be quicker: of the plans that fit, those are tried whose step would be the
    shortest if everything that can be early were.

    Args:
        best: the quickest attempt so far.
        fitting: those that fit with nothing on the host.
        split: whether gradients of parameters are computed in modules of their own.
        microbatches: into how many a batch is split.
        limit: bytes that a device may allocate, at any position of its order.
    """
    promising = []
    for start in fitting:
        if isinstance(start.candidate.saved, Chosen):
            choices = find_early_choices(start.candidate.saved.graph, start.candidate.saved.candidate.schedule, split)
            promising.append((_makespan_if_early(start, choices, microbatches), start, choices))
    # A plan that recomputes more can win if its recomputation fits into waits. Few candidates, most promising first.
    for shortest, hopeful, choices in sorted(promising, key=lambda item: (item[0], item[1].peak))[:_MOST_FILLED]:
        if shortest < best.seconds * (1 - _LONGER):
            best = min([best, *_fill(hopeful, choices, attempt, limit)], key=lambda tried: tried.seconds)
    return best


def _fill(
    start: ScheduleEvaluation,
    choices: EarlyChoices,
    attempt: Callable[[SimulatedSchedule], ScheduleEvaluation],
    limit: int,
) -> list[ScheduleEvaluation]:
    """An attempt with as much early as fits: each device halves the early part of its stages until it is within the
    limit."""
    assert isinstance(start.candidate.saved, Chosen)
    candidate = start.candidate.saved.candidate
    level = {stage: len(of_stage) - 1 for stage, of_stage in choices.items()}
    orders = start.timing.schedule.orders
    while any(level.values()):
        filled = attempt(dataclasses.replace(candidate, schedule=move_early(candidate.schedule, choices, level)))
        full = [order for order, peak in zip(orders, filled.peaks, strict=True) if peak > limit]
        # Only stages on devices over the limit give up part of what is early; each round halves it.
        over = {stage for order in full for stage in order[:, 1].tolist() if level.get(stage)}
        if not full:
            return [filled]
        if not over:
            break
        for stage in over:
            level[stage] //= 2
    return []


def _makespan_if_early(attempt: ScheduleEvaluation, choices: EarlyChoices, microbatches: int) -> float:
    """Simulate the makespan with everything early that may be, regardless of memory."""
    assert isinstance(attempt.candidate.saved, Chosen)
    steps = [step for _, block in attempt.candidate.saved.candidate.schedule.backward for step in block]
    main = attempt.emitted.main
    seconds, reads = dict(main.costs.seconds), dict(main.steps.graph.reads)
    for stage, of_stage in choices.items():
        early = sum(steps[position].seconds or steps[position].operation.seconds for position in of_stage[-1])
        backward = next((step for step in ((k, stage) for k in _GRADIENTS) if step in seconds), None)
        if early and backward is not None:
            # As a schedule would look if all early steps were free: a lower bound on the step.
            recompute = (ActionKind.RECOMPUTE, stage)
            seconds[recompute], seconds[backward] = early, max(seconds[backward] - early, 0.0)
            reads[recompute] = tuple(source for source in reads[backward] if source[0] is ActionKind.FORWARD)
            reads[backward] = (*reads[backward], recompute)
    graph = StageGraph(reads, main.steps.graph.carried)
    costs = StepCosts(seconds=seconds, transfer_seconds=main.costs.transfer_seconds)
    variant = dataclasses.replace(main, steps=dataclasses.replace(main.steps, graph=graph), costs=costs)
    return dataclasses.replace(attempt.emitted, main=variant, last=variant).predict(microbatches).makespan
