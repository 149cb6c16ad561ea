"""The segments of a graph as the links of a chain, and what the chain's decisions mean for the graph.

A segment's options are the vertices of its frontier, the leanest in several variants of thrift. Behind each option
stands what it keeps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roundpipe_fx.analysis.operations import Operation, OperationGraph
from roundpipe_fx.remat.arrange import MOST_THRIFT
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain import Chain, Decision, Link, LinkOption
from roundpipe_fx.remat.frontier import Known, Saving, frontier
from roundpipe_fx.remat.progress import progress
from roundpipe_fx.remat.regions import within_regions
from roundpipe_fx.remat.schedule import Choice, just_in_time, peak_of_forward

__all__ = ["Keeping", "chain_of", "choice_of", "crossing_storages"]


@dataclass(frozen=True)
class Keeping:
    """What stands behind an option of the chain.

    Attributes:
        saved: storages that it keeps.
        thrift: of the segment's backward.
    """

    saved: frozenset[int]
    thrift: int


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
            # Thrift matters where least is kept: there what a backward makes again decides the peak.
            thrift = MOST_THRIFT if index == len(savings) - 1 else 0
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
        (Keeping(saved, thrift), LinkOption(held, seconds, running, peak))
        for thrift, (peak, seconds) in enumerate(blocks.costs(segment, saved, available, most))
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
