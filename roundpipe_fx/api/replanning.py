"""Replanning: the next plan takes into account what a step has shown and its plan did not know.

Data-dependent sizes, memory that operators allocate internally, and calls that are alive at once are observed as steps
run; that there is less memory than the budget says is observed when it runs out.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from roundpipe_fx import torch_private
from roundpipe_fx.api.learned import Learned
from roundpipe_fx.budget import InfeasibleBudgetError, plan_or_error
from roundpipe_fx.distributed.process_pipeline import NewObservations, ProcessPipeline
from roundpipe_fx.pipeline.capture.captured_calls import UnlikeStagesError
from roundpipe_fx.pipeline.step.scheduled import UnequalMicrobatchesError
from roundpipe_fx.report.out_of_memory_text import original_text

T = TypeVar("T")
log = logging.getLogger(__name__)

_SMALLER = 0.8
"""The share of the budget that remains after running out of memory."""
_CLOSER = 0.98
"""The further share that remains of a budget in which microbatches do not fit together."""
_TRIES = 5
"""Maximum number of times that a step is replanned because its microbatches do not fit together."""


def run_with_replanning(
    run: Callable[[], Any],
    recompile: Callable[[], None],
    learned: Learned,
    devices: Sequence[torch.device],
    budgeted: bool,
    repeatable: Callable[[], bool] = lambda: True,
) -> Any:
    """Run a step; recompile it first if its plan is stale, and once more if memory runs out.

    Args:
        run: the step, or its forward.
        recompile: makes the next ``run`` recompile and replan.
        learned: what plans assume; steps extend it.
        devices: whose random number generators the step draws from, besides the CPU's.
        budgeted: whether the step has a memory budget, which can be made smaller.
        repeatable: whether a step that has run out of memory may run again: no optimizer has updated parameters in it.

    Raises:
        InfeasibleBudgetError: steps have shown that the budget cannot be met.
        torch.OutOfMemoryError: memory ran out with a smaller budget too, or there is no smaller one.
    """
    run = functools.partial(run_cut_alike, run, recompile)
    learned.calls.report()
    if learned.steps.stale and torch.is_grad_enabled():
        plan_or_error(learned.steps.split_budget(learned.share))
        learned.stale = True
    if learned.stale:
        learned.renew()
        log.info("replanning with the observations of steps: %s", learned.assumed)
        recompile()
    if not budgeted or not torch.is_grad_enabled():
        return run()
    restore = torch_private.save_rng_states(devices)
    try:
        return _run_fitting(run, recompile, learned)
    except torch.OutOfMemoryError as error:
        if not repeatable():
            raise
        # Outside the handler the error's traceback no longer holds what the step had allocated.
        failure = error.with_traceback(None)
    restore()
    learned.share *= _SMALLER
    warnings.warn(
        f"roundpipe_fx: the step ran out of memory ({original_text(str(failure)).splitlines()[0]}). Replanning with "
        f"{learned.share:.0%} of the budget and running the step again.",
        stacklevel=4,
    )
    recompile()
    try:
        return _run_fitting(run, recompile, learned)
    except InfeasibleBudgetError:
        raise failure from None  # which says what was planned
    except torch.OutOfMemoryError as error:
        failure = error.with_traceback(None)  # which says what the smaller plan was
    raise failure from None


def replan_on_all_ranks(
    run: Callable[[], Any],
    recompile: Callable[[], None],
    learned: Learned,
    budgeted: bool,
    processes: ProcessPipeline,
) -> Any:
    """Run a step on plans that assume the same on all ranks. Arguments as for :func:`run_with_replanning`.

    What steps of all ranks have shown is put together. A rank that runs out of memory fails, and all others with it.
    All graphs are cut like the first, and ranks must not try different things, so less is tried than in one process.
    """
    processes.shown = lambda: None if learned.stale else str(sorted(learned.largest.items()) if budgeted else "")
    run_step = functools.partial(_run_fitting, run, recompile, learned) if budgeted and torch.is_grad_enabled() else run
    while True:
        try:
            return run_step()
        except NewObservations:
            ranks = processes.group.everyone if torch.is_grad_enabled() else processes.group.sharers
            for largest in ranks.gather(learned.largest):
                learned.merge(largest)
            if learned.stale:
                learned.renew()
                log.info("replanning with the observations of all ranks' steps: %s", learned.assumed)
                recompile()


def _run_fitting(run: Callable[[], Any], recompile: Callable[[], None], learned: Learned) -> Any:
    """Run a step; recompile it for a smaller budget if its microbatches do not fit together."""
    before, refused = learned.share, False
    for _ in range(_TRIES):
        try:
            return run()
        except UnequalMicrobatchesError as error:
            unfitting = error.unfitting
            if unfitting.least and refused:
                raise
            # Dynamo has seen several sizes by now and may trace one graph for all of them, which decides what is least.
            refused = unfitting.least
            closer = learned.share * _CLOSER * unfitting.allowed / unfitting.needed
            learned.share = before if refused else closer
            log.info("%s Replanning with %.0f%% of the budget.", error, 100 * learned.share)
            recompile()
    learned.share = 0.0  # the plans that need least
    try:
        return run()
    finally:
        learned.share = before


def run_cut_alike(run: Callable[[], T], recompile: Callable[[], None]) -> T:
    """Run a step; recompile it if earlier steps cut some of its microbatches otherwise than others.

    A graph stays as it was cut when it was compiled, with microbatches of other shapes or alone. Recompiled in one
    step, all are cut like the first.

    Args:
        run: the step. Nothing of it has run when microbatches turn out to be cut differently.
        recompile: makes the next ``run`` recompile.

    Returns:
        what ``run`` returns.

    Raises:
        UnlikeStagesError: they cannot be cut alike.
    """
    try:
        return run()
    except UnlikeStagesError as error:
        log.info("recompiling: %s", error)
    recompile()
    return run()
