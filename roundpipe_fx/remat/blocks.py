"""Blocks: the backward of one segment, arranged so that few bytes live at one time.

Just-in-time recomputation gives the steps; :mod:`roundpipe_fx.remat.reduce_peak` gives sequences of them that take ever
less memory and ever more seconds. Blocks that differ only in the numbers of their storages are arranged once. ::

    segment's forward     a = f(x)   b = g(a)            saved: x
    its backward          b' needs a and b
    level 0               a = f(x); b = g(a); b'(a, b)           a is held from its recomputation to b'
    level 1               a = f(x); b = g(a); drop a; …; a = f(x); b'     lower peak if a is idle there
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from roundpipe_fx.analysis.operations import OperationGraph, PlannedOp
from roundpipe_fx.remat.alike import backward_key
from roundpipe_fx.remat.reduce_peak import MAX_REMAT_LEVEL, PeakReducer
from roundpipe_fx.remat.schedule import PlannedSchedule, RematChoice, recompute_just_in_time


@dataclass(frozen=True)
class Block:
    """A segment's backward.

    Attributes:
        steps: what runs, in order.
        peak: the most bytes alive meanwhile. Of storages that live from before, only the segment's own forward storages
            count.
        seconds: modelled seconds of recomputation.
    """

    steps: tuple[PlannedOp, ...]
    peak: int
    seconds: float


class Blocks:
    """Blocks of a graph's segments.

    Args:
        reduce_peak: whether to look for orders with low peaks; else steps stay as they come.
    """

    def __init__(self, graph: OperationGraph, reduce_peak: bool = True) -> None:
        self.graph = graph
        self._reduce_peak = reduce_peak
        self.entering, self.lasting = _live_across_backward(graph)
        self._sequences: dict[Any, list[tuple[list[int], int]]] = {}
        self._blocks: dict[Any, list[Block]] = {}
        self._shapes: dict[Any, int] = {}
        self._costs: dict[Any, list[tuple[int, float]]] = {}

    def block(self, segment: int, available: AbstractSet[int], remat_level: int = 0) -> Block:
        """A segment's backward.

        Args:
            available: forward storages that need not be recomputed.
            remat_level: how far to go in dropping recomputed storages; at most the highest level there is.
        """
        variants = self.variants(segment, available, MAX_REMAT_LEVEL if remat_level else 0)
        return variants[min(remat_level, len(variants) - 1)]

    def variants(self, segment: int, available: AbstractSet[int], most: int = MAX_REMAT_LEVEL) -> list[Block]:
        """A segment's backward at each rematerialization level, up to ``most``."""
        reach, entering = self._recomputable_storages(segment)
        # What has to be recomputed of earlier segments is not in the key of segments that are alike, so this block is
        # arranged by itself.
        if not entering <= available:  # it reaches back into earlier segments
            return self._lower_peaks(segment, recompute_just_in_time(self.graph, segment, available), most, None)
        kind, numbers = self._equal_segment(segment)
        # The key: which of the storages that may be recomputed are there already. All else is equal for segments that
        # are alike.
        there = frozenset([numbers[storage] for storage in reach & available if storage in numbers])
        known = (segment, most, there)
        if known not in self._blocks:
            steps = recompute_just_in_time(self.graph, segment, available)
            self._blocks[known] = self._lower_peaks(segment, steps, most, (kind, there))
        return self._blocks[known]

    def costs(
        self, segment: int, saved: AbstractSet[int], earlier: AbstractSet[int], most: int
    ) -> list[tuple[int, float]]:
        """Peak bytes and seconds of the variants of a segment's backward; computed once for segments that are alike.

        Args:
            saved: storages of the segment that need not be recomputed.
            earlier: all storages of earlier segments, and those that are always available.
            most: the highest rematerialization level.
        """
        kind, numbers = self._equal_segment(segment)
        known = (kind, most, frozenset(numbers[storage] for storage in saved if storage in numbers))
        if known not in self._costs:
            variants = self.variants(segment, saved | earlier, most)
            self._costs[known] = [(block.peak, block.seconds) for block in variants]
        return self._costs[known]

    @functools.cache  # noqa: B019 - lives as long as the search
    def _equal_segment(self, segment: int) -> tuple[int, dict[int, int]]:
        """Equal numbers for segments with backwards that are alike, and numbers for their storages."""
        shape, numbers = backward_key(self.graph, segment, self.entering[segment], self.lasting[segment])
        return self._shapes.setdefault(shape, len(self._shapes)), numbers

    @functools.cache  # noqa: B019 - lives as long as the search
    def _recomputable_storages(self, segment: int) -> tuple[frozenset[int], frozenset[int]]:
        """Forward storages that a segment's backward may recompute, and those of earlier segments that this reads."""
        graph = self.graph
        reached: set[int] = set()
        entering: set[int] = set()
        pending = [storage for operation in graph.backward[segment] for storage in operation.reads]
        while pending:
            storage = pending.pop()
            # A storage of an earlier segment is where the search ends: either it is kept, or the block reaches back
            # into that segment.
            if storage in reached or not graph.is_forward(storage):
                continue
            if graph.segment_of[storage] < segment and storage not in graph.always_live:
                entering.add(storage)
            else:
                reached.add(storage)
                pending += graph.recipes[storage].reads if storage in graph.recipes else ()
        return frozenset(reached), frozenset(entering)

    def _lower_peaks(self, segment: int, steps: list[PlannedOp], most: int, like: Any) -> list[Block]:
        """Arrange steps into blocks with ever lower peaks; ``like`` is a key of equal steps, or ``None``."""
        graph = self.graph
        read = {storage for step in steps for storage in step.reads}
        # The structure leaves out the numbers of storages, so the twelve layers of a model are arranged once.
        entering = self.entering[segment] & read
        known = self._sequences.get((like, most)) if like is not None else None
        if known is None:
            allocated = {storage for step in steps for storage in step.makes}
            local = {s for s in read - allocated if graph.is_forward(s) and graph.segment_of[s] == segment}
            reducer = PeakReducer(graph, steps, local | entering, self.lasting[segment])
            key = (reducer.structure(), most)
            if key not in self._sequences:
                self._sequences[key] = reducer.find_sequences(most) if self._reduce_peak else reducer.given_order()
            known = self._sequences[key]
            if like is not None:
                self._sequences[like, most] = known
        # Storages that enter the block are counted by the chain as resident; here they would count twice.
        credit = sum(graph.sizes[storage] for storage in entering)
        blocks = []
        for sequence, peak in known:
            ordered = tuple([steps[position] for position in sequence])
            blocks.append(Block(ordered, peak - credit, sum(step.seconds for step in ordered)))
        return blocks


def planned_schedule(blocks: Blocks, choice: RematChoice) -> PlannedSchedule:
    """Turn a choice into a schedule: what runs in the backward, in order."""
    graph = blocks.graph
    available = choice.kept | graph.always_live
    backward = []
    # Backward order: the last segment's backward runs first, and what it holds is there for all earlier ones.
    for segment in range(graph.segments - 1, -1, -1):
        steps: list[PlannedOp] = []
        wanted = choice.held.get(segment)
        if wanted:
            steps += recompute_just_in_time(graph, segment, available, wanted)
            available |= wanted
        steps += blocks.block(segment, available, choice.remat_level.get(segment, 0)).steps
        backward.append((segment, steps))
    live = _drop_unread(backward)
    return PlannedSchedule(choice, live, sum(step.seconds for _, steps in live for step in steps))


def _drop_unread(
    backward: Sequence[tuple[int, Sequence[PlannedOp]]],
) -> tuple[tuple[int, tuple[PlannedOp, ...]], ...]:
    """The steps without recomputations whose result is not read before it is recomputed once more, if ever."""
    read: set[int] = set()
    read_blocks = []
    for segment, steps in reversed(backward):
        # From the end: a recomputation is wanted only if a step behind it reads its result. Steps of the graph itself
        # always run.
        kept = []
        for step in reversed(steps):
            if step.recipe is not None and read.isdisjoint(step.makes):
                continue
            read.difference_update(step.makes)
            read.update(step.reads)
            kept.append(step)
        read_blocks.append((segment, tuple(reversed(kept))))
    return tuple(reversed(read_blocks))


def _live_across_backward(graph: OperationGraph) -> tuple[list[set[int]], list[set[int]]]:
    """By segment, storages of the backward that live when its backward begins; and those that live when it ends."""
    born: dict[int, int] = dict.fromkeys(graph.tangents, graph.segments)
    dies: dict[int, int] = {}
    for segment in range(graph.segments - 1, -1, -1):
        for operation in graph.backward[segment]:
            # `born` counts backwards: a storage made in the backward of segment 5 lives from 5 down to the segment that
            # reads it last.
            born.update(dict.fromkeys(operation.makes, segment))
            dies.update({s: segment for s in operation.reads if s in born})
    # Gradients live to the end: they die at -1, behind the backward of segment 0.
    dies.update(dict.fromkeys((*graph.gradients, *graph.held), -1))
    entering: list[set[int]] = [set() for _ in range(graph.segments)]
    lasting: list[set[int]] = [set() for _ in range(graph.segments)]
    for storage, birth in born.items():
        death = dies.get(storage, birth)
        for segment in range(max(death, 0), min(birth, graph.segments)):
            entering[segment].add(storage)
        for segment in range(death + 1, min(birth, graph.segments - 1) + 1):
            lasting[segment].add(storage)
    return entering, lasting
