"""The first plan of a graph that is known to be one of several parts of a step.

FSDP2 gathers the parameters of each sharded part in hooks that Dynamo does not trace, so such a model is several
graphs. How they depend on each other is known once a step has run. Until then each part is planned as if all were like
it, for the least bytes that they then need together, so that the first step is within the budget too. A budget that
cannot be met is refused once all graphs are known, before the first backward: only then the least one can be named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from roundpipe_fx.analysis.step_of_calls import (
    Footprint,
    NotedCall,
    NotedEvent,
    NotedStep,
    StepNeeds,
    simulate_step_peak,
)
from roundpipe_fx.budget import Found, Infeasible, Result
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.options import Options

_EMPTY = Footprint(forward=0, saved=0, outputs=0)


def lower_as_one_of(
    joint: JointGraph,
    parts: int,
    options: Options,
    lower: Callable[[JointGraph, Options, StepNeeds | None], Result[Lowered]],
) -> Result[Lowered]:
    """Lower a graph for the least bytes that a step needs in which each of its graphs is like this one.

    Args:
        joint: a captured graph; it may be rewritten.
        parts: how many graphs the step is expected to have.
        lower: lowers a graph with other options, and the needs of a step.

    Returns:
        the graph; if the budget is below what it alone needs, planned for the least bytes.
    """
    step = _chain(joint, parts)
    tightest = dataclasses.replace(options, memory_budget=0.0)
    leanest = lower(joint.copy(), tightest, StepNeeds("", (step,), {}))
    budget = options.memory_budget
    if isinstance(leanest, Infeasible) or not isinstance(budget, int):
        return leanest
    if simulate_step_peak(_chain(joint, 1), {"": leanest.value.footprint}) > budget:
        result = lower(joint, options, None)  # in tiles
        if isinstance(result, Found) or result.wants_sizes:
            return result
    return leanest


def _chain(joint: JointGraph, parts: int) -> NotedStep:
    """A step in which each call reads what the one before returns."""
    count = len(joint.primals)
    calls = tuple(
        NotedCall(
            graph="",
            inputs=tuple(range(number * count, (number + 1) * count)),
            outputs=(),
            new_input_bytes=0,
            consumed=number < parts - 1,
            footprint=_EMPTY,
        )
        for number in range(parts)
    )
    forwards = [(NotedEvent.FORWARD, number) for number in range(parts)]
    backwards = [(event, n) for n in reversed(range(parts)) for event in (NotedEvent.BACKWARD, NotedEvent.FREED)]
    return NotedStep(calls, (*forwards, *backwards))
