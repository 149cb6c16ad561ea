"""Measured seconds of stage actions, which correct modelled ones.

When an action of a step began and ended is known anyway (``plan.timeline()``). With the median over microbatches in
place of its modelled seconds, a schedule is simulated again. Plans that are made later multiply the modelled seconds of
each kind of action by what the kind took longer::

    spans ─▶ seconds by stage action ─▶ the same schedule, corrected
                                     └▶ measured / modelled, by kind, in steps of 5 % ─▶ the next plan
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from roundpipe_fx.runtime.pipeline_run import Span
from roundpipe_fx.schedules import ActionKind, StepCosts
from roundpipe_fx.schedules.action import StageAction

_STEP = 1.05
"""Factors are rounded to powers of it, so that plans do not differ by what a clock shows."""


def measured_seconds(spans: Iterable[Iterable[Span]]) -> dict[StageAction, float]:
    """The median over microbatches of the seconds of each stage action.

    Args:
        spans: of a step, for each device. On an accelerator it is waited for.
    """
    seconds: dict[StageAction, list[float]] = {}
    for of_device in spans:
        for span in of_device:
            start, end = span.seconds()
            seconds.setdefault(span.action.step, []).append(end - start)
    return {step: statistics.median(taken) for step, taken in seconds.items()}


def with_measured(costs: StepCosts, spans: Iterable[Iterable[Span]]) -> StepCosts:
    """The same costs with measured seconds, where a step has some.

    Args:
        spans: of the step, for each device.
    """
    return dataclasses.replace(costs, seconds={**costs.seconds, **measured_seconds(spans)})


def pace_of(
    modelled: Mapping[StageAction, float],
    steps: Sequence[Iterable[Iterable[Span]]],
    before: Mapping[ActionKind, float],
) -> Mapping[ActionKind, float]:
    """Factors by which each kind of action takes longer than its unscaled model says.

    Args:
        modelled: seconds that a plan has, multiplied by ``before`` already.
        steps: spans of the latest step, for each device; empty before the first.
        before: the factors that the plan was made with.

    Returns:
        The new factors; ``before`` if nothing was measured.
    """
    if not steps:
        return before
    totals: dict[ActionKind, list[float]] = {}
    for (kind, stage), seconds in measured_seconds(steps[-1]).items():
        total = totals.setdefault(kind, [0.0, 0.0])
        total[0] += seconds
        total[1] += modelled.get((kind, stage), 0.0)
    return {
        **before,
        **{
            kind: _STEP ** round(math.log(before.get(kind, 1.0) * measured / expected, _STEP))
            for kind, (measured, expected) in totals.items()
            if measured > 0 and expected > 0
        },
    }
