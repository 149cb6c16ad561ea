"""Pipelines whose stages Inductor compiles, judged by the code that it writes for them.

The search counts operations. The code of its result is read, and the difference between the budget and the code's bytes
corrects the budget of the next search::

    budget 100      searched for within 100:  the code needs 70     fits, and recomputes
                    searched for within 130:  the code needs 103    does not fit
                    searched for within 127:  the code needs 99     taken, if its step is shorter than the first one's
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable

from roundpipe_fx.budget import Found, Infeasible, bytes_text, limit_of
from roundpipe_fx.compiler.lowered import without_donation
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline, Variant, make_variant
from roundpipe_fx.planner.evaluation import ScheduleEvaluation, find_quickest, with_timing
from roundpipe_fx.planner.judged_by_code import judge_by_code
from roundpipe_fx.planner.schedule_within_budget import refuse_budget
from roundpipe_fx.remat.choose import Unmet

log = logging.getLogger(__name__)

_SEARCHED = 3
"""Searches for a budget, at most, beside the one for what needs least."""
_SPARE = 0.05
"""Share of the budget that code leaves from which on another plan is searched for."""
_NEAR = (1.05, 1.1)
"""Factors on the least that operations need, for pipelines whose code may need less than that one's."""

_Search = Callable[[int | float], Found[ScheduleEvaluation] | Unmet]


def judge_pipeline(evaluation: ScheduleEvaluation) -> ScheduleEvaluation:
    """The same pipeline, whose bytes are those of its stages' code."""
    pipeline = evaluation.emitted
    main = _judge_variant(pipeline.main, pipeline)
    last = main if pipeline.last is pipeline.main else _judge_variant(pipeline.last, pipeline)
    pipeline = dataclasses.replace(pipeline, main=main, last=last)
    return with_timing(evaluation, pipeline, pipeline.predict(pipeline.pipelining.microbatches))


def search_by_code(search: _Search, budget: int | float, share: float) -> Found[ScheduleEvaluation] | Unmet:
    """The pipeline with the shortest step that is found with the code of every device's stages within the budget.

    Args:
        search: finds a pipeline whose operations are within a budget.
        budget: bytes a device, or a share of the way from what the leanest pipeline's code needs to what that of
            saving everything needs.
        share: of the budget that may be used.
    """
    tried: list[ScheduleEvaluation] = []
    if isinstance(budget, int):
        limit = int(budget * share)
    else:
        # A share of the way between two ends, both of which are searched: budget 0.3 needs those of 0.0 and 1.0.
        for end in sorted({math.floor(budget), math.ceil(budget)}):
            result = search(float(end))
            if isinstance(result, Infeasible):
                return result
            tried.append(judge_pipeline(result.value))
        peaks = [evaluation.peak for evaluation in tried]
        # Ends and peaks are those of the code, which may need less than operations do.
        limit = int(limit_of(budget, min(peaks), max(peaks)) * share)
    asked = budget
    for _ in range(0 if any(_is_good(evaluation, limit) for evaluation in tried) else _SEARCHED):
        result = search(asked)
        if isinstance(result, Infeasible):
            break
        evaluation = judge_pipeline(result.value)
        tried.append(evaluation)
        log.info("searched for within %s: the code needs %s", asked, bytes_text(evaluation.peak))
        if _is_good(evaluation, limit):
            break
        searched = evaluation.emitted.budget
        assert searched is not None
        # What the code needs less is given to the next search; what it needs more is taken away.
        asked = max(math.ceil((searched + limit - evaluation.peak) / share), 1)
    if all(evaluation.peak > limit for evaluation in tried):
        least = _find_least(search, share)
        if isinstance(least, Infeasible):
            return least
        tried.append(least.value)
        # The least that can be searched for, judged by its code, is more than the budget.
        if least.value.peak > limit and isinstance(budget, int):
            emitted = least.value.emitted
            return refuse_budget(budget, least.value.peak, emitted.structure, emitted.pipelining)
        limit = max(limit, min(evaluation.peak for evaluation in tried))
    best = find_quickest(tried, limit)
    assert best is not None
    allowed = budget if isinstance(budget, int) else None
    return Found(dataclasses.replace(best, emitted=dataclasses.replace(best.emitted, budget=limit, allowed=allowed)))


def _is_good(evaluation: ScheduleEvaluation, limit: int) -> bool:
    """Test for a pipeline within a limit that leaves hardly anything of it, or recomputes nothing."""
    least = (1 - _SPARE) * limit
    return evaluation.peak <= limit and (evaluation.peak >= least or not evaluation.recompute_seconds)


def _find_least(search: _Search, share: float) -> Found[ScheduleEvaluation] | Unmet:
    """Find the pipeline whose code needs least among those whose operations need about the least."""
    # One byte is below any plan, and the refusal names the least that operations need.
    result = search(1)
    if isinstance(result, Infeasible):
        result = search(math.ceil(result.minimum / share))
    if isinstance(result, Infeasible):
        return result
    pipelines = [result.value]
    for factor in _NEAR:
        near = search(math.ceil(factor * result.value.peak / share))
        if isinstance(near, Found):
            pipelines.append(near.value)
    return Found(min(map(judge_pipeline, pipelines), key=lambda evaluation: evaluation.peak))


def _judge_variant(variant: Variant, pipeline: LoweredPipeline) -> Variant:
    lowered = judge_by_code(variant.lowered)
    assert lowered.follow is not None
    lowered = dataclasses.replace(lowered, follow=without_donation(lowered.follow))
    return make_variant(lowered, lowered.setting, pipeline.pipelining)
