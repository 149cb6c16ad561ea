"""The search for plans: from a graph's operations to schedules on the trade-off of peak bytes and recompute seconds.

Each segment's frontier gives its options; the chain of segments with these options is solved for every amount of
memory; each distinct solution becomes a schedule, and the simulator computes its true peak. This corrects what the
solver rounded or did not see (values that skip over segments, storages that die early) before anything is chosen.

Each simulation takes time, so only some solutions are simulated: a few that are spread evenly over all, and those that
a bisection between two candidates comes to once the limit is known. For 10 GiB::

    solutions, by the chain's seconds    0.0     0.1     0.2     0.3     0.4
    simulated by the search: GiB         12.0                            9.0     the limit is between these
    the middle                                           10.5                    over it: go on with more seconds
    the middle of what is left                                   9.6             within it, and quicker than 0.4
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.console.progress import progress
from roundpipe_fx.remat.blocks import Blocks, planned_schedule
from roundpipe_fx.remat.chain import SegmentChain
from roundpipe_fx.remat.schedule import Peak, PlannedSchedule, RematChoice, simulate
from roundpipe_fx.remat.segment_chain import SaveOption, chain_of, make_remat_choice
from roundpipe_fx.remat.solve_chain import Solution, solve_chain

T = TypeVar("T")

FINE_SLOTS = 1000
_NESTED_SLOTS = (200, 400)
_NESTED_WORK = 16_000
"""Slots times segments: long chains get fewer slots."""
NESTED_SHARE = 1.25
"""Nested recomputation is considered up to this share of the lowest peak that is reached without it."""
_LEVELS = 6
"""Number of solutions of each chain that are simulated, spread over the whole trade-off."""
_LOWEST = 12
"""Number of solutions with the least memory that are simulated where none yet stays within the limit."""
_HALVINGS = 6
"""Number of plans that are simulated between two, for a limit that lies between them."""


@dataclass(frozen=True)
class SimulatedSchedule:
    """A schedule and what it costs."""

    schedule: PlannedSchedule
    peak: Peak

    @property
    def seconds(self) -> float:
        """Modelled seconds of recomputation."""
        return self.schedule.seconds


def save_everything(blocks: Blocks) -> SimulatedSchedule:
    """The candidate that saves everything."""
    return make_schedule_of_choice(blocks, RematChoice(frozenset(blocks.graph.makers)))


@dataclass(frozen=True)
class ParetoPoint:
    """A solution of the chain that differs from those with less memory.

    Attributes:
        seconds: modelled seconds of recomputation, as the chain counts them.
        choice: what it saves and holds.
    """

    seconds: float
    choice: Callable[[], RematChoice]


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        candidates: those that none dominates in peak and seconds, highest peak first.
        points: every solution of the chain, fewest seconds first; the candidates are some of them, simulated.
    """

    candidates: list[SimulatedSchedule]
    points: list[ParetoPoint]


def search(blocks: Blocks, most: int = _LEVELS, kept: SimulatedSchedule | None = None) -> SearchResult:
    """Candidates spread over the whole trade-off, and what lies between them.

    Args:
        most: maximum number of solutions that are simulated of each chain: without nested recomputation, and with it.
        kept: the candidate that saves everything, if it is known.
    """
    chain, save_options = chain_of(blocks)
    if blocks.graph.regions:
        kept = save_most(blocks, save_options)
    kept = kept or save_everything(blocks)
    # Fine slots without nesting (time linear in the segments), then coarse slots with nesting for the low end, where
    # only nested recomputation can go further.
    fine = _points(blocks.graph, save_options, solve_chain(chain, kept.peak.bytes, FINE_SLOTS, nested=False))
    candidates = [kept]
    candidates += [
        make_schedule_of_choice(blocks, point.choice())
        for point in progress(sample_evenly(fine, most), "judging plans")
    ]
    low = min(item.peak.bytes for item in candidates)
    solution = solve_chain(chain, int(low * NESTED_SHARE), nested_slots(chain))
    nested = _points(blocks.graph, save_options, solution)
    judged = progress(sample_evenly(nested, most), "judging plans with nested recomputation")
    candidates += [make_schedule_of_choice(blocks, point.choice()) for point in judged]
    return SearchResult(pareto_schedules(candidates), sorted([*fine, *nested], key=lambda point: point.seconds))


def nested_slots(chain: SegmentChain) -> int:
    """Number of memory slots where recomputation is nested."""
    fewest, finest = _NESTED_SLOTS
    # Tables have segments² × slots entries. With a constant product of slots and segments they grow linearly with the
    # chain.
    return min(max(_NESTED_WORK // len(chain.stages), fewest), finest)


def refine(blocks: Blocks, result: SearchResult, limit: int) -> list[SimulatedSchedule]:
    """More candidates around a limit, by bisection between the two that it lies between.

    Only candidates between their neighbours in both peak and seconds are taken. So as limits fall, each refined on its
    own, peaks never rise and seconds never fall. Below the lowest peak, the solutions for the least memory are tried,
    the same ones for every limit.
    """
    candidates = list(result.candidates)
    # Below every candidate: all that is left are the solutions with the least memory, judged by simulation.
    if limit < candidates[-1].peak.bytes:
        lower = [make_schedule_of_choice(blocks, point.choice()) for point in result.points[-_LOWEST:]]
        return pareto_schedules([*candidates, *(item for item in lower if item.seconds >= candidates[-1].seconds)])
    at = next((i for i, item in enumerate(candidates) if item.peak.bytes <= limit), 0)
    if not at:
        return candidates
    over, within = candidates[at - 1], candidates[at]
    between = result.points
    inserted = []
    for _ in range(_HALVINGS):
        # Bisection in seconds, between the neighbours of the limit. Invariant: over.peak > limit >= within.peak. A
        # solution whose simulation is not between both in peak and seconds is left out, and the next one is tried.
        between = [point for point in between if over.seconds < point.seconds < within.seconds]
        if not between:
            break
        item = make_schedule_of_choice(blocks, between.pop(len(between) // 2).choice())
        if over.seconds < item.seconds < within.seconds and within.peak.bytes < item.peak.bytes < over.peak.bytes:
            inserted.append(item)
            over, within = (over, item) if item.peak.bytes <= limit else (item, within)
    return pareto_schedules([*candidates, *inserted])


def save_most(blocks: Blocks, save_options: list[list[SaveOption]]) -> SimulatedSchedule:
    """Make the candidate that saves as much as the budgets of regions allow."""
    graph = blocks.graph
    kept = {storage for options in save_options for storage in options[0].saved}
    return make_schedule_of_choice(blocks, RematChoice(frozenset(kept | graph.live_across)))


def make_schedule_of_choice(blocks: Blocks, choice: RematChoice) -> SimulatedSchedule:
    """Make the schedule of a choice; storages that must not be saved are recomputed with their checkpoint."""
    schedule = planned_schedule(blocks, _apply_region_budgets(blocks.graph, choice))
    return SimulatedSchedule(schedule, simulate(blocks.graph, schedule))


def _apply_region_budgets(graph: OperationGraph, choice: RematChoice) -> RematChoice:
    # Values that may not be saved (inside a user's checkpoint) are recomputed at the segment where their region begins.
    barred = choice.kept & graph.must_recompute
    if not barred:
        return choice
    held = {segment: set(storages) for segment, storages in choice.held.items()}
    for storage in barred & graph.hold_at.keys():
        held.setdefault(graph.hold_at[storage], set()).add(storage)
    frozen = {segment: frozenset(storages) for segment, storages in held.items()}
    return RematChoice(choice.kept - barred, frozen, choice.remat_level)


def pareto_schedules(candidates: Sequence[SimulatedSchedule]) -> list[SimulatedSchedule]:
    """Schedules that no other dominates in peak and seconds, highest peak first."""
    best: list[SimulatedSchedule] = []
    # By seconds, so a candidate is dominated exactly if an earlier one has no higher peak.
    for item in sorted(candidates, key=lambda item: (item.seconds, item.peak.bytes)):
        if not best or item.peak.bytes < best[-1].peak.bytes:
            best.append(item)
    return best


def _points(graph: OperationGraph, save_options: list[list[SaveOption]], solution: Solution) -> list[ParetoPoint]:
    def choice(slots: int) -> RematChoice:
        return make_remat_choice(graph, save_options, solution.decisions(slots))

    return [ParetoPoint(float(solution.seconds[slots]), partial(choice, slots)) for slots in levels(solution)]


def levels(solution: Solution) -> list[int]:
    """The least memory of distinct solutions, in slots, least first."""
    reachable = np.flatnonzero(np.isfinite(solution.seconds))
    # `prepend=inf`: the least memory is always a distinct solution.
    distinct = np.diff(solution.seconds[reachable], prepend=np.inf) < 0
    return [int(slots) for slots in reachable[distinct]]


def sample_evenly(items: Sequence[T], most: int) -> list[T]:
    """At most ``most`` of the items, evenly spread, including the first and the last."""
    positions = np.unique(np.linspace(0, len(items) - 1, min(len(items), most)).round().astype(int))
    return [items[position] for position in positions]
