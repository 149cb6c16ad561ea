"""Microbatches in flight: what a run of segments may keep when what it keeps is there several times.

A device of a pipeline holds what was kept for every microbatch that has been forward and not yet backward, and runs one
of them at a time. So bytes that are kept count as often as microbatches are in flight, what a recomputation makes again
counts once, and the less is kept the more it is worth to keep only what enters a stage. The chain is that of
:mod:`roundpipe_fx.planner.chain`, with what the first forward keeps counted for each microbatch. That of later links is
counted where a link is run on to, not where the backward has come back from: the schedule's simulation judges.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from roundpipe_fx.planner.chain import Chain, Solution, solve_chain
from roundpipe_fx.planner.links import Keeping, choice_of
from roundpipe_fx.planner.operations import OperationGraph
from roundpipe_fx.planner.schedule import Choice
from roundpipe_fx.planner.search import FINE_SLOTS, NESTED_SHARE, Rung, levels, nested_slots, spread

__all__ = ["Run", "rungs_of_run", "together"]

_MOST = 32
"""So many rungs of a run are there to choose from."""


@dataclass(frozen=True)
class Run:
    """Segments whose kept values lie on the same devices.

    Attributes:
        first: segment.
        end: the segment after the last one.
        devices: numbers of the devices.
        in_flight: microbatches that each of these devices holds at most at one time.
    """

    first: int
    end: int
    devices: frozenset[int]
    in_flight: int


def rungs_of_run(graph: OperationGraph, chain: Chain, keepings: list[list[Keeping]], run: Run) -> list[Rung]:
    """What a run may keep: ever fewer bytes for ever more seconds.

    Args:
        graph: the operations.
        chain: of all segments.
        keepings: what stands behind its options.
        run: the segments.
    """
    part = chain.part(run.first, run.end, run.in_flight)
    whole = sum(max(option.held for option in link.options) for link in part.links) * run.in_flight
    most = whole + max(
        max(option.forward, option.backward) + link.standing + link.standing_forward
        for link in part.links
        for option in link.options
    )
    found = _rungs(graph, keepings, run, solve_chain(part, most, FINE_SLOTS, nested=False))
    if len(part.links) > 1 or run.in_flight > 1:
        low = min(size for size, _ in found)
        solution = solve_chain(part, int(low * NESTED_SHARE), nested_slots(part))
        found += _rungs(graph, keepings, run, solution)
    best: list[tuple[float, Rung]] = []
    for size, rung in sorted(found, key=lambda item: (item[1].seconds, item[0])):
        if not best or size < best[-1][0]:
            best.append((size, rung))
    return spread([rung for _, rung in best], _MOST)


def _rungs(
    graph: OperationGraph, keepings: list[list[Keeping]], run: Run, solution: Solution
) -> list[tuple[float, Rung]]:
    def choice(slots: int) -> Choice:
        decisions = [
            dataclasses.replace(
                decision,
                before=None if decision.before is None else decision.before + run.first,
                link=decision.link + run.first,
                until=decision.until + run.first,
            )
            for decision in solution.decisions(slots)
        ]
        return choice_of(graph, keepings, decisions)

    return [
        (slots * solution.slot, Rung(float(solution.seconds[slots]), partial(choice, slots)))
        for slots in levels(solution)
    ]


def together(choices: list[Choice]) -> Choice:
    """Choices for different segments as one."""
    return Choice(
        frozenset().union(*(choice.kept for choice in choices)),
        {segment: storages for choice in choices for segment, storages in choice.held.items()},
        {segment: thrift for choice in choices for segment, thrift in choice.thrift.items()},
    )
