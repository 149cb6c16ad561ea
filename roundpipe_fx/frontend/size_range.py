"""Size ranges: the input sizes that a plan is made and used for.

A graph that was traced with symbolic sizes runs with many sizes, but its plan is made for numbers. A budget in bytes
must hold for each size that the plan is used with. So the plan is made for sizes one step above the current ones, and
used up to there; a guard makes Dynamo recompile beyond. If the plan recomputes, it is not used far below either, since
smaller inputs need less recomputation. Steps are relative to the size, so sizes that are far apart need few plans. With
one symbolic size, of which a step is an eighth::

    current size    planned for    used for, if it recomputes    if it recomputes nothing
    1,000           1,120          889 … 1,120                   up to 1,120
    1,024           1,152          911 … 1,152                   up to 1,152
    37              41             33 … 41                       up to 41

A size that the user bounds (``torch._dynamo.mark_dynamic(…, max=…)``) is planned for at its bound. If no plan fits the
budget one step above, the current size itself is tried.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from roundpipe_fx.budget import Found, Infeasible, Result
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.torch_private import InputSize, assume_sizes, input_sizes

log = logging.getLogger(__name__)

_STEP = 0.125
"""Size of a step, as a share of the size; divided among the symbolic sizes."""

T = TypeVar("T")


def lower_for_sizes(
    joint: JointGraph,
    assumed: Mapping[str, int],
    lower: Callable[[JointGraph], Result[T]],
    recomputes: Callable[[T], bool],
) -> Result[T]:
    """Lower a graph within a budget in bytes, and guard that the result is used only with sizes it was made for.

    Args:
        joint: a captured graph; it may be rewritten.
        assumed: assumed values of data-dependent sizes, by symbol.
        recomputes: whether a result of ``lower`` recomputes anything.

    Returns:
        the result of ``lower``: infeasible where the budget is below what the step needs with the current sizes, or
        with the largest ones of a range given by the user.
    """
    sizes = input_sizes(joint.module)
    factor = 1 + _STEP / max(len(sizes), 1)
    largest = {size.symbol: size.largest or steps_above(size.current, factor) for size in sizes}
    exact = {size.symbol: size.largest or size.current for size in sizes}
    attempts = [({**assumed, **largest}, False), ({**assumed, **exact}, False)]
    if assumed:
        # A plan for larger data-dependent sizes also holds for smaller ones, for which the search may miss it.
        attempts.append(({**assumed, **exact}, True))
    attempts = [earlier for position, earlier in enumerate(attempts) if earlier not in attempts[:position]]
    refused: list[Infeasible[str]] = []
    for attempt, is_upper_bound in attempts:
        tried = joint.copy() if (attempt, is_upper_bound) != attempts[-1] else joint
        assume_sizes(tried.module, attempt, at_most=is_upper_bound)
        result = lower(tried)
        if isinstance(result, Found):
            break
        refused.append(result)
        log.info("no plan fits the budget for sizes of %s", attempt)
    else:
        return min(refused, key=lambda infeasible: infeasible.minimum)
    for size in sizes:
        if size.largest is None:
            size.keep_within(_smallest_size(size, factor) if recomputes(result.value) else 0, attempt[size.symbol])
    return result


def steps_above(size: int, factor: float) -> int:
    """A size up to ``factor`` times as large, divisible by the same small powers of two."""
    unit = math.gcd(size, 1 << max(int((factor - 1) * size) // 2, 1).bit_length() - 1)
    return size + int((factor - 1) * size) // unit * unit


def _smallest_size(size: InputSize, factor: float) -> int:
    return math.ceil(size.current / factor)
