"""The largest batch whose step fits a device, found by the planner.

A probe plans a step for a number of rows, which takes seconds, so the next number is where the bytes that a step needs,
as the probes before show them, reach the budget. They grow about in proportion to the rows::

    bytes │               ╱×   122 rows are refused, and need at least 26 GiB
          │             ╱
    budget├───────────×─────   by the line from 1 row to these 98 fit; they are refused, too
          │         ╱          by the line through both refusals 97 fit, and they do
          │  ●   ╱             1 row takes 1.4 GiB
          └──────────────── rows

An estimate decides only what is tried next. The search ends where so many rows have a plan, and one row more has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roundpipe_fx.budget import InfeasibleBudgetError
from roundpipe_fx.report.plan import Plan

_MOST = 2**16
"""Rows. A model that fits with more is not searched further."""
_AHEAD = 8
"""Times as many rows as would fit if nothing were recomputed or tiled: what is refused says most about what fits."""
_PATIENCE = 2
"""Probes that may follow estimates without halving what is left to search; the next one halves it."""


def largest_batch(
    planned: Callable[[int], Plan], note: Callable[[int, Plan | None], None] = lambda rows, plan: None
) -> tuple[int, Plan]:
    """The largest number of rows for which there is a plan.

    What a step needs is taken to grow with its rows.

    Args:
        planned: the plan for so many rows, within a budget in bytes that is the same for all.
        note: called with each number of rows that was tried, and its plan; ``None``: it does not fit.

    Returns:
        the number of rows, and its plan.

    Raises:
        InfeasibleBudgetError: not even one row fits.
    """
    first = planned(1)
    note(1, first)
    # The line begins at one row; without a budget of its own the first plan's peak stands for it.
    search = _BatchSearch(best=(1, first), budget=first.budget or first.peak_bytes, needs=[(1, first.peak_bytes)])
    while (rows := search.next_rows()) is not None:
        try:
            fitting = planned(rows)
        except InfeasibleBudgetError as error:
            search.refused(rows, error.minimum)
            note(rows, None)
        else:
            search.fits(rows, fitting)
            note(rows, fitting)
    return search.best


@dataclass(kw_only=True)
class _BatchSearch:
    """Results of the probes so far.

    Attributes:
        best: the most rows that have a plan, and it.
        budget: bytes that a step may take.
        needs: rows and bytes of two probes, the last of which says most: one row, or what was refused.
        over: the fewest rows that were refused.
        probes: tried since the interval of rows that are left was last halved.
        width: of that interval then.
    """

    best: tuple[int, Plan]
    budget: int
    needs: list[tuple[int, int]]
    over: int = _MOST + 1
    probes: int = 0
    width: int = _MOST

    def next_rows(self) -> int | None:
        """The rows to try next: more than fit so far, and fewer than were refused; ``None``: the search is over."""
        rows, left = self.best[0], self.over - self.best[0]
        if left <= 1:
            return None
        # Nothing was refused yet. The first jump goes to `_AHEAD` times the rows that the budget would hold in
        # proportion, so that it is refused, and a refusal gives the second point of the line; otherwise rows are
        # multiplied by four.
        if self.over > _MOST:
            return min(_MOST, max(4 * rows, _AHEAD * self.budget // max(self.needs[0][1], 1) if rows == 1 else 0))
        self.probes += 1
        # The estimate is trusted while it halves the interval within `_PATIENCE` probes; otherwise the next probe
        # halves it, so that the search ends after at most log2 steps of that kind.
        if 2 * left <= self.width:
            self.width, self.probes = left, 0
        if self.probes > _PATIENCE:
            return rows + left // 2
        (first, first_bytes), (last, last_bytes) = self.needs
        # Bytes of a further row, by the line through both probes; a flat line says nothing about where the budget is.
        growth = (last_bytes - first_bytes) / (last - first)
        fit = int(last - (last_bytes - self.budget) / growth) if growth > 0 else 0
        # More rows fit than was estimated: how many more is not known, unless both ends of the line were refused.
        further = rows + (1 if first > rows else max(1, rows // 16))
        # Below the fewest rows that were refused: each probe shrinks the interval by at least one row.
        return min(fit if fit > rows else further, self.over - 1)

    def fits(self, rows: int, plan: Plan) -> None:
        """Record that a number of rows has a plan."""
        self.best = rows, plan

    def refused(self, rows: int, needed: int) -> None:
        """Record that a number of rows has none, and the bytes that it needs at the least."""
        # The last two refusals are the ends of the next line: near the limit they say more than one row does.
        self.over, self.needs = rows, [self.needs[-1], (rows, needed)]
