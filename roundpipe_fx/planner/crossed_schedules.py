"""Crossed schedules: the choice of one schedule for the segment where operations peak, those of another for the others.

All schedules are found for operations one by one, and their peak is mostly in one segment: a language model's head.
To lower it, the planner recomputes that segment's values anew for each reader. Where kernels do not make most of them,
this gains nothing: as the head is recomputed, the code needs more, and all later schedules have that head::

    schedules                                    A          B          C
    head                                         saved      twice      twice
    recomputed before it                         nothing    nothing    all
    operations one by one                        9          6          5
    estimated                                    4          6          5

    crossed: C with the head of A                saved, all recomputed before it: estimated 3

So where the last schedule is estimated to need less with the segment as an earlier one has it, all those in between are
crossed as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import make_schedule_of_choice
from roundpipe_fx.remat.choose import Chosen
from roundpipe_fx.remat.schedule import RematChoice


def cross_at_peak(plans: Sequence[Chosen], estimate: Callable[[Chosen], int]) -> list[Chosen]:
    """Add schedules that keep an earlier one's choice for the segment where operations peak, if that needs less.

    Args:
        plans: schedules of one graph, the least recomputation first.
        estimate: gives the bytes that a schedule's code is estimated to need.

    Returns:
        the schedules, the least recomputation first; those that crossed ones replace are left out.
    """
    first, last = plans[0], plans[-1]
    segment = first.candidate.peak.segment
    choices = [_choice_at(plan, segment) for plan in plans]
    # The last schedule before each change of the segment, up to the one that all later schedules have.
    earlier = [at for at in range(len(plans) - 1) if choices[at] != choices[at + 1] and choices[at] != choices[-1]]
    if not earlier:
        return list(plans)
    blocks = Blocks(last.graph)
    crossed = {at: _cross(blocks, plans[at], last, segment) for at in earlier}
    best = min(earlier, key=lambda at: estimate(crossed[at]))
    if estimate(crossed[best]) >= estimate(last):
        return list(plans)
    between = [_cross(blocks, plans[best], plan, segment) for plan in plans[best + 1 : -1]]
    return sorted([*plans[: best + 1], *between, crossed[best]], key=lambda plan: plan.candidate.seconds)


def _choice_of(plan: Chosen) -> RematChoice:
    """The choice of a schedule, in storages of the graph that plans are searched for."""
    # Only the schedule that keeps everything may follow other operations, which are numbered otherwise.
    return plan.candidate.schedule.choice if plan.followed is plan.graph else RematChoice(frozenset(plan.graph.makers))


def _choice_at(plan: Chosen, segment: int) -> Any:
    choice, segment_of = _choice_of(plan), plan.graph.segment_of
    kept = {storage for storage in choice.kept if segment_of[storage] == segment}
    return kept, choice.held.get(segment), choice.remat_level.get(segment, 0)


def _cross(blocks: Blocks, at_peak: Chosen, elsewhere: Chosen, segment: int) -> Chosen:
    """The schedule that treats a segment as one schedule does, and the other segments as another."""
    graph = elsewhere.graph
    choice = _cross_choices(graph, _choice_of(at_peak), _choice_of(elsewhere), segment)
    candidate = make_schedule_of_choice(blocks, choice)
    limit = max(elsewhere.limit, candidate.peak.bytes)
    return dataclasses.replace(elsewhere, candidate=candidate, limit=limit, followed=graph)


def _cross_choices(graph: OperationGraph, at_peak: RematChoice, elsewhere: RematChoice, segment: int) -> RematChoice:
    def chosen_by(segment_or_storage: int) -> RematChoice:
        return at_peak if segment_or_storage == segment else elsewhere

    both = at_peak, elsewhere
    return RematChoice(
        frozenset(s for choice in both for s in choice.kept if chosen_by(graph.segment_of[s]) is choice),
        {key: held for choice in both for key, held in choice.held.items() if chosen_by(key) is choice},
        {key: level for choice in both for key, level in choice.remat_level.items() if chosen_by(key) is choice},
    )
