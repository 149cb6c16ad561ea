"""The search for plans: from a graph's operations to schedules on the trade-off of peak bytes and recompute seconds.

Each segment's frontier gives its options; the chain of segments with these options is solved for every amount of
memory; each distinct solution becomes a schedule, and the simulator says what it truly peaks at. What the solver
rounded or did not see (values that skip over segments, storages that die early) is so put right before anything is
chosen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roundpipe_fx.planner.blocks import MOST_THRIFT, Blocks, make_schedule
from roundpipe_fx.planner.chain import Chain, Decision, Link, LinkOption, Solution, solve_chain
from roundpipe_fx.planner.frontier import Known, Saving, frontier
from roundpipe_fx.planner.operations import Operation, OperationGraph
from roundpipe_fx.planner.regions import within_regions
from roundpipe_fx.planner.schedule import Choice, Peak, Schedule, just_in_time, peak_of_forward, simulate
from roundpipe_fx.progress import progress

__all__ = [
    "Candidate",
    "Keeping",
    "best_of",
    "chain_of",
    "choice_of",
    "crossing_storages",
    "everything_kept",
    "levels",
    "search",
    "work_out",
]

_FINE_SLOTS = 1000
_NESTED_SLOTS = 200
_NESTED_SHARE = 1.25
"""Nested recomputation is looked at up to this share of the lowest peak that is reached without it."""
_LEVELS = 12
_THRIFTY = 2
"""So many of a segment's leanest savings get thrifty options."""


@dataclass(frozen=True)
class Keeping:
    """What stands behind an option of the chain.

    Attributes:
        saved: storages that it keeps.
        thrift: of the segment's backward.
    """

    saved: frozenset[int]
    thrift: int


@dataclass(frozen=True)
class Candidate:
    """A schedule and what it costs.

    Attributes:
        schedule: what runs.
        peak: simulated.
    """

    schedule: Schedule
    peak: Peak

    @property
    def seconds(self) -> float:
        """Modelled seconds of recomputation."""
        return self.schedule.seconds


def everything_kept(blocks: Blocks) -> Candidate:
    """Nothing runs again."""
    return work_out(blocks, Choice(frozenset(blocks.graph.makers)))


def search(blocks: Blocks) -> list[Candidate]:
    """Candidates of which none is better than another in both peak and seconds, highest peak first."""
    chain, keepings = chain_of(blocks)
    kept = _most_kept(blocks, keepings) if blocks.graph.regions else everything_kept(blocks)
    fine = solve_chain(chain, kept.peak.bytes, _FINE_SLOTS, nested=False)
    found = [kept]
    choices = _choices(blocks.graph, keepings, fine)
    found += [work_out(blocks, choice) for choice in progress(choices, "judging plans")]
    low = min(item.peak.bytes for item in found)
    nested = solve_chain(chain, int(low * _NESTED_SHARE), _NESTED_SLOTS)
    choices = _choices(blocks.graph, keepings, nested)
    found += [work_out(blocks, choice) for choice in progress(choices, "judging plans with nested recomputation")]
    return best_of(found)


def _most_kept(blocks: Blocks, keepings: list[list[Keeping]]) -> Candidate:
    """As little runs again as the budgets of regions allow."""
    graph = blocks.graph
    kept = {storage for options in keepings for storage in options[0].saved}
    return work_out(blocks, Choice(frozenset(kept | graph.crossing)))


def work_out(blocks: Blocks, choice: Choice) -> Candidate:
    """What a choice comes to. What it would keep and must not is made again, where its checkpoint is recomputed."""
    schedule = make_schedule(blocks, _heeding_regions(blocks.graph, choice))
    return Candidate(schedule, simulate(blocks.graph, schedule))


def _heeding_regions(graph: OperationGraph, choice: Choice) -> Choice:
    barred = choice.kept & graph.not_kept
    if not barred:
        return choice
    held = {segment: set(storages) for segment, storages in choice.held.items()}
    for storage in barred & graph.hold_at.keys():
        held.setdefault(graph.hold_at[storage], set()).add(storage)
    frozen = {segment: frozenset(storages) for segment, storages in held.items()}
    return Choice(choice.kept - barred, frozen, choice.thrift)


def best_of(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those than which no other is better in both peak and seconds, highest peak first."""
    best: list[Candidate] = []
    for item in sorted(candidates, key=lambda item: (item.seconds, item.peak.bytes)):
        if not best or item.peak.bytes < best[-1].peak.bytes:
            best.append(item)
    return best


def _choices(graph: OperationGraph, keepings: list[list[Keeping]], solution: Solution) -> list[Choice]:
    return [choice_of(graph, keepings, solution.decisions(slots)) for slots in levels(solution)]


def levels(solution: Solution) -> list[int]:
    """The least memory of distinct solutions, in slots, spread over the seconds that they take."""
    seconds = solution.seconds
    reachable = np.flatnonzero(np.isfinite(seconds))
    if not len(reachable):
        return []
    first = reachable[np.flatnonzero(np.diff(seconds[reachable], prepend=np.inf) < 0)]
    if len(first) > _LEVELS:
        first = first[np.unique(np.linspace(0, len(first) - 1, _LEVELS).round().astype(int))]
    return [int(slots) for slots in first]


def choice_of(graph: OperationGraph, keepings: list[list[Keeping]], decisions: list[Decision]) -> Choice:
    """What the decisions about a chain keep and hold; ``keepings``: by segment, what stands behind its options."""
    kept: set[int] = set()
    held: dict[int, set[int]] = defaultdict(set)
    thrift: dict[int, int] = {}
    for decision in decisions:
        target = kept if decision.before is None else held[decision.before]
        if decision.bare is not None:
            thrift[decision.link] = decision.bare
        elif decision.option is not None:
            keeping = keepings[decision.link][decision.option]
            target |= keeping.saved
            thrift[decision.link] = keeping.thrift
        if decision.until < graph.segments:
            target |= crossing_storages(graph, decision.link, decision.until)
    return Choice(frozenset(kept), {segment: frozenset(storages) for segment, storages in held.items()}, thrift)


def crossing_storages(graph: OperationGraph, first: int, until: int) -> set[int]:
    """Storages made by segments ``first`` up to ``until`` that ``until`` or a later one reads."""
    return {
        storage for segment in range(first, until) for storage, last in graph.crossers.get(segment, ()) if last >= until
    }


def chain_of(blocks: Blocks) -> tuple[Chain, list[list[Keeping]]]:
    """The chain of segments, and by segment what stands behind its options."""
    graph = blocks.graph
    made: dict[int, set[int]] = defaultdict(set)
    for storage in graph.makers:
        made[graph.segment_of[storage]].add(storage)
    forward = defaultdict(list)
    for operation in graph.forward:
        forward[operation.segment].append(operation)
    hoisted = np.cumsum([_bytes(graph, made[i] & graph.always_kept) for i in range(graph.segments)])
    outputs = _bytes(graph, graph.outputs - graph.always_kept)
    links = []
    keepings: list[list[Keeping]] = []
    known: Known = {}
    available: set[int] = set(graph.at_hand)
    frontiers: list[list[Saving]] = []
    for segment in progress(range(graph.segments), "what each segment may keep"):
        needed = dict.fromkeys(storage for operation in graph.backward[segment] for storage in operation.reads)
        frontiers.append(frontier(graph, list(needed), available, known))
        available |= made[segment]
    frontiers = within_regions(graph, frontiers)
    available = set(graph.at_hand)
    for segment, savings in progress(enumerate(frontiers), "the backward of each segment", graph.segments):
        leaving = crossing_storages(graph, segment, segment + 1)
        found: list[tuple[Keeping, LinkOption]] = []
        for index, saving in enumerate(savings):
            # Thrift matters where little is kept: there what a backward makes again decides the peak.
            thrift = MOST_THRIFT if index >= len(savings) - _THRIFTY else 0
            found += _options(blocks, segment, available, saving.saved, leaving, forward[segment], thrift)
        found = _worthwhile(found)
        bare = _options(blocks, segment, available, frozenset(), leaving, forward[segment], MOST_THRIFT)
        keepings.append([keeping for keeping, _ in found])
        links.append(
            Link(
                sum(step.seconds for step in just_in_time(graph, segment, available, leaving)),
                peak_of_forward(graph, forward[segment], leaving),
                tuple(option for _, option in found),
                tuple(option for _, option in bare),
                int(hoisted[segment]) + outputs + _bytes(graph, blocks.entering[segment]),
                int(hoisted[segment]),
            )
        )
        available |= made[segment]
    return Chain(tuple(links), _crossing_bytes(graph)), keepings


def _options(
    blocks: Blocks,
    segment: int,
    available: AbstractSet[int],
    saved: frozenset[int],
    leaving: Collection[int],
    forward: Sequence[Operation],
    most: int,
) -> list[tuple[Keeping, LinkOption]]:
    """Ways to keep ``saved``: one for each level of thrift, up to ``most``."""
    graph = blocks.graph
    lasting = saved.union(leaving)
    held, running = _bytes(graph, lasting), peak_of_forward(graph, forward, lasting)
    return [
        (Keeping(saved, thrift), LinkOption(held, block.seconds, running, block.peak))
        for thrift, block in enumerate(blocks.variants(segment, saved.union(available), most))
    ]


def _worthwhile(options: list[tuple[Keeping, LinkOption]]) -> list[tuple[Keeping, LinkOption]]:
    """Those than which no other is as good in what it holds, its peak and its seconds; the first stays first."""
    best: list[tuple[Keeping, LinkOption]] = []
    for keeping, option in sorted(options, key=lambda item: (item[1].seconds, item[1].held, item[1].backward)):
        if not any(o.held <= option.held and o.backward <= option.backward for _, o in best):
            best.append((keeping, option))
    return best


def _bytes(graph: OperationGraph, storages: Iterable[int]) -> int:
    return sum(graph.sizes[storage] for storage in storages)


def _crossing_bytes(graph: OperationGraph) -> NDArray[np.int64]:
    """``[i, k]``: bytes of :func:`crossing_storages`."""
    count = graph.segments
    table = np.zeros((count, count), dtype=np.int64)
    for made, storages in graph.crossers.items():
        for storage, last in storages:
            table[: made + 1, made + 1 : last + 1] += graph.sizes[storage]
    return table
