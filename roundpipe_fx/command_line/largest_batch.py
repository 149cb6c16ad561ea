"""The largest batch whose step fits a device, by bisection on the planner."""

from __future__ import annotations

from collections.abc import Callable

from roundpipe_fx.budget import InfeasibleBudgetError
from roundpipe_fx.report.plan import Plan

__all__ = ["largest_batch"]

_MOST = 2**16
"""Rows. A model that fits with more is not searched further."""


def largest_batch(
    planned: Callable[[int], Plan], note: Callable[[int, Plan | None], None] = lambda rows, plan: None
) -> tuple[int, Plan]:
    """The largest number of rows for which there is a plan.

    Doubled until it does not fit, then bisected: what a step needs grows with its rows.

    Args:
        planned: the plan for so many rows.
        note: called with each number of rows that was tried, and its plan; ``None``: it does not fit.

    Returns:
        the number of rows, and its plan.

    Raises:
        InfeasibleBudgetError: not even one row fits.
    """
    best = 1, planned(1)
    note(*best)
    over = 2
    while over <= _MOST and (found := _tried(planned, over, note)) is not None:
        best, over = (over, found), 2 * over
    if over > _MOST:
        return best
    while over - best[0] > 1:
        rows = (best[0] + over) // 2
        found = _tried(planned, rows, note)
        if found is None:
            over = rows
        else:
            best = rows, found
    return best


def _tried(planned: Callable[[int], Plan], rows: int, note: Callable[[int, Plan | None], None]) -> Plan | None:
    try:
        found = planned(rows)
    except InfeasibleBudgetError:
        found = None
    note(rows, found)
    return found
