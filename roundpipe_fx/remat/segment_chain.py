"""The segments of a graph as the stages of a chain, and what the chain's decisions mean for the graph.

A segment's options are the vertices of its frontier, the one with the fewest bytes at several rematerialization levels.
A :class:`SaveOption` records what an option saves. Decisions about a chain of four segments, as a program makes them::

    before   at   decision        kept from the first forward on
    -        0    run on to 2     what 0 and 1 make and 2 or 3 reads
    -        2    option 0        what this option of 2 saves, and what 2 makes and 3 reads
    -        3    option 1        what this option of 3 saves
                                  held for the backwards of 1 and 0, which follow those of 3 and 2
    1        0    option 0        what this option of 0 saves, and what 0 makes and a later segment reads
    1        1    backward        nothing: it recomputes just in time what it needs of 1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roundpipe_fx.analysis.operations import Operation, OperationGraph
from roundpipe_fx.console.progress import progress
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain import ChainStage, ChainStageOption, Decision, SegmentChain
from roundpipe_fx.remat.frontier import Known, Saving, frontier
from roundpipe_fx.remat.reduce_peak import MAX_REMAT_LEVEL
from roundpipe_fx.remat.regions import drop_over_region_budget
from roundpipe_fx.remat.schedule import RematChoice, peak_of_forward, recompute_just_in_time


@dataclass(frozen=True)
class SaveOption:
    """Values that an option of the chain saves.

    Attributes:
        remat_level: of the segment's backward.
    """

    saved: frozenset[int]
    remat_level: int


def make_remat_choice(
    graph: OperationGraph, save_options: list[list[SaveOption]], decisions: list[Decision]
) -> RematChoice:
    """Turn decisions about a chain into a choice; ``save_options``: by segment, what its options save."""
    kept: set[int] = set()
    held: dict[int, set[int]] = defaultdict(set)
    remat_level: dict[int, int] = {}
    for decision in decisions:
        # Decisions in the first forward choose what is kept; later ones are made before some segment's backward, and
        # are held there.
        target = kept if decision.before is None else held[decision.before]
        if decision.unsaved_option is not None:
            remat_level[decision.stage] = decision.unsaved_option
        elif decision.option is not None:
            save_option = save_options[decision.stage][decision.option]
            target |= save_option.saved
            remat_level[decision.stage] = save_option.remat_level
        # Running on to a later segment keeps exactly what crosses into it.
        if decision.until < graph.segments:
            target |= storages_live_across(graph, decision.stage, decision.until)
    return RematChoice(
        frozenset(kept), {segment: frozenset(storages) for segment, storages in held.items()}, remat_level
    )


def storages_live_across(graph: OperationGraph, first: int, until: int) -> set[int]:
    """Storages made by segments ``first`` up to ``until`` that ``until`` or a later one reads."""
    return {
        storage
        for segment in range(first, until)
        for storage, last in graph.live_across_from.get(segment, ())
        if last >= until
    }


def chain_of(blocks: Blocks) -> tuple[SegmentChain, list[list[SaveOption]]]:
    """The chain of segments, and by segment what its options save."""
    graph = blocks.graph
    allocated: dict[int, set[int]] = defaultdict(set)
    for storage in graph.makers:
        allocated[graph.segment_of[storage]].add(storage)
    forward = defaultdict(list)
    for operation in graph.forward:
        forward[operation.segment].append(operation)
    # Hoisted values are saved whatever is chosen. They accumulate: the segments up to this one have made theirs.
    hoisted = np.cumsum([_bytes(graph, allocated[i] & graph.must_save) for i in range(graph.segments)])
    outputs = _bytes(graph, graph.outputs - graph.must_save)
    stages = []
    save_options: list[list[SaveOption]] = []
    known: Known = {}
    available: set[int] = set(graph.always_live)
    frontiers: list[list[Saving]] = []
    for segment in progress(range(graph.segments), "what each segment may keep"):
        needed = dict.fromkeys(storage for operation in graph.backward[segment] for storage in operation.reads)
        frontiers.append(frontier(graph, list(needed), available, known))
        # A segment may read everything that earlier ones have made: whether that is kept is the chain's decision.
        available |= allocated[segment]
    # Regions span segments, so all frontiers are needed before any is cut down.
    frontiers = drop_over_region_budget(graph, frontiers)
    available = set(graph.always_live)
    for segment, savings in progress(enumerate(frontiers), "the backward of each segment", graph.segments):
        # What leaves the segment counts as held by each of its options, whether the backward reads it or not.
        leaving = storages_live_across(graph, segment, segment + 1)
        options: list[tuple[SaveOption, ChainStageOption]] = []
        for index, saving in enumerate(savings):
            # Levels matter where least is saved: there recomputed storages decide the peak.
            remat_level = MAX_REMAT_LEVEL if index == len(savings) - 1 else 0
            options += _options(blocks, segment, available, saving.saved, leaving, forward[segment], remat_level)
        options = _drop_dominated(options)
        unsaved_options = _options(blocks, segment, available, frozenset(), leaving, forward[segment], MAX_REMAT_LEVEL)
        save_options.append([save_option for save_option, _ in options])
        stages.append(
            ChainStage(
                seconds=sum(step.seconds for step in recompute_just_in_time(graph, segment, available, leaving)),
                forward=peak_of_forward(graph, forward[segment], leaving),
                options=tuple(option for _, option in options),
                unsaved_options=tuple(option for _, option in unsaved_options),
                resident=int(hoisted[segment]) + outputs + _bytes(graph, blocks.entering[segment]),
                resident_forward=int(hoisted[segment]),
            )
        )
        available |= allocated[segment]
    return SegmentChain(tuple(stages), _live_across_bytes(graph)), save_options


def _options(
    blocks: Blocks,
    segment: int,
    available: AbstractSet[int],
    saved: frozenset[int],
    leaving: Collection[int],
    forward: Sequence[Operation],
    most: int,
) -> list[tuple[SaveOption, ChainStageOption]]:
    """Options that save ``saved``: one for each rematerialization level, up to ``most``."""
    graph = blocks.graph
    lasting = saved.union(leaving)
    held, running = _bytes(graph, lasting), peak_of_forward(graph, forward, lasting)
    return [
        (SaveOption(saved, remat_level), ChainStageOption(held, seconds, running, peak))
        for remat_level, (peak, seconds) in enumerate(blocks.costs(segment, saved, available, most))
    ]


def _drop_dominated(options: list[tuple[SaveOption, ChainStageOption]]) -> list[tuple[SaveOption, ChainStageOption]]:
    """Options that no other dominates in bytes held, peak and seconds; the first stays first."""
    # Invariant: `best` is sorted by seconds, so only bytes are left to compare.
    best: list[tuple[SaveOption, ChainStageOption]] = []
    # From the quickest on, each is dominated only by one before it.
    for save_option, option in sorted(options, key=lambda item: (item[1].seconds, item[1].held, item[1].backward)):
        if not any(o.held <= option.held and o.backward <= option.backward for _, o in best):
            best.append((save_option, option))
    return best


def _bytes(graph: OperationGraph, storages: Iterable[int]) -> int:
    return sum(graph.sizes[storage] for storage in storages)


def _live_across_bytes(graph: OperationGraph) -> NDArray[np.int64]:
    """``[i, k]``: bytes of :func:`storages_live_across`."""
    count = graph.segments
    table = np.zeros((count, count), dtype=np.int64)
    for maker, storages in graph.live_across_from.items():
        for storage, last in storages:
            # A storage made by segment m and last read by segment l crosses every pair (i, k) with i <= m < k <= l.
            table[: maker + 1, maker + 1 : last + 1] += graph.sizes[storage]
    return table
