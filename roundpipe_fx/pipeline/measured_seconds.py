"""Measured seconds of stage actions, which correct modelled ones.

When an action of a step began and ended is known anyway (``plan.timeline()``). With the median over microbatches in
place of its modelled seconds, a schedule is simulated again.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable

from roundpipe_fx.runtime.pipeline_run import Span
from roundpipe_fx.schedules import StepCosts
from roundpipe_fx.schedules.action import StageAction


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


def replace_by_measured(costs: StepCosts, spans: Iterable[Iterable[Span]]) -> StepCosts:
    """Replace modelled seconds by measured ones, for the stage actions that a step has measured.

    Args:
        spans: of the step, for each device.
    """
    return dataclasses.replace(costs, seconds={**costs.seconds, **measured_seconds(spans)})
