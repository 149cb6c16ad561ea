"""Blocks: the backward of one segment, arranged so that few bytes live at one time.

Just-in-time recomputation gives the steps; :mod:`roundpipe_fx.planner.order` puts them into an order with a low peak.
Beyond that a block can be *thriftier*: what was made again and is alive at the peak without being read there is
dropped, and made once more before its next reader (as XLA's rematerialization pass does). Each level of thrift trades
seconds for bytes inside the block.

Blocks that are alike but for the numbers of their storages are arranged once.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from roundpipe_fx.liveness import Event, LivePeak, peak_of
from roundpipe_fx.planner.operations import OperationGraph
from roundpipe_fx.planner.order import order_events
from roundpipe_fx.planner.schedule import Choice, Schedule, Step, backward_events, just_in_time

__all__ = ["MOST_THRIFT", "Block", "Blocks", "make_schedule"]

MOST_THRIFT = 4
_TRIES = 8
"""How many droppings are looked at for one that lowers the peak."""


@dataclass(frozen=True)
class Block:
    """A segment's backward.

    Attributes:
        steps: what runs, in order.
        peak: bytes at most alive meanwhile, where of what lives from before only the segment's own forward storages
            count.
        seconds: modelled seconds of what runs again.
    """

    steps: tuple[Step, ...]
    peak: int
    seconds: float


class Blocks:
    """Blocks of a graph's segments.

    Args:
        graph: the operations.
        arrange: whether to look for orders with low peaks; else steps stay as they come.
    """

    def __init__(self, graph: OperationGraph, arrange: bool = True) -> None:
        self.graph = graph
        self._arrange = arrange
        self.entering, self.lasting = _crossing_backward(graph)
        self._arrangements: dict[Any, list[tuple[list[int], int]]] = {}
        self._blocks: dict[Any, list[Block]] = {}

    def block(self, segment: int, available: AbstractSet[int], thrift: int = 0) -> Block:
        """A segment's backward.

        Args:
            segment: whose.
            available: forward storages that need not be made again.
            thrift: how far to go in dropping what was made again; the most there is, if that is less.
        """
        variants = self.variants(segment, available, MOST_THRIFT if thrift else 0)
        return variants[min(thrift, len(variants) - 1)]

    def variants(self, segment: int, available: AbstractSet[int], most: int = MOST_THRIFT) -> list[Block]:
        """A segment's backward, ever thriftier, up to a thrift of ``most``."""
        reach, entering = self._reach(segment)
        if not entering <= available:  # it reaches back into earlier segments
            return self._arranged(segment, just_in_time(self.graph, segment, available), most)
        known = (segment, most, frozenset(reach & available))
        if known not in self._blocks:
            self._blocks[known] = self._arranged(segment, just_in_time(self.graph, segment, available), most)
        return self._blocks[known]

    @functools.cache  # noqa: B019 - lives as long as the search
    def _reach(self, segment: int) -> tuple[frozenset[int], frozenset[int]]:
        """Forward storages that a segment's backward may need made again, and what of earlier segments they need."""
        graph = self.graph
        found: set[int] = set()
        entering: set[int] = set()
        pending = [storage for operation in graph.backward[segment] for storage in operation.reads]
        while pending:
            storage = pending.pop()
            if storage in found or not graph.is_forward(storage):
                continue
            if graph.segment_of[storage] < segment and storage not in graph.at_hand:
                entering.add(storage)
            else:
                found.add(storage)
                pending += graph.ways[storage].reads if storage in graph.ways else ()
        return frozenset(found), frozenset(entering)

    def _arranged(self, segment: int, steps: list[Step], most: int) -> list[Block]:
        graph = self.graph
        made = {storage for step in steps for storage in step.makes}
        read = {storage for step in steps for storage in step.reads}
        own = {s for s in read - made if graph.is_forward(s) and graph.segment_of[s] == segment}
        entering = self.entering[segment] & read
        arranger = _Arranger(graph, steps, own | entering, self.lasting[segment])
        key = (most, arranger.structure())
        if key not in self._arrangements:
            self._arrangements[key] = arranger.arrangements(most) if self._arrange else arranger.as_they_come()
        credit = sum(graph.sizes[storage] for storage in entering)
        found = []
        for sequence, peak in self._arrangements[key]:
            arranged = tuple(steps[position] for position in sequence)
            found.append(Block(arranged, peak - credit, sum(step.seconds for step in arranged)))
        return found


class _Arranger:
    """Arranges the steps of one block. A sequence lists positions of steps; a step that runs twice is listed twice."""

    def __init__(
        self, graph: OperationGraph, steps: Sequence[Step], before: Collection[int], lasting: Collection[int]
    ) -> None:
        self._graph = graph
        self._steps = steps
        self._before = before
        self._lasting = lasting
        used = {storage for step in steps for storage in (*step.reads, *step.makes)}
        self._sizes = {storage: graph.sizes[storage] for storage in used.union(before)}

    def structure(self) -> Any:
        """Equal for blocks that are alike but for the numbers of their storages."""
        events, sizes, _ = self._events(range(len(self._steps)))
        numbers: dict[int, int] = {}
        own = set(self._before).union(*(event.makes for event in events))

        def number(storage: int) -> int:
            return numbers.setdefault(storage, len(numbers)) if storage in own else -1

        shape = tuple(
            (
                tuple(map(number, event.reads)),
                tuple((number(s), sizes[s], s in self._lasting) for s in event.makes),
                tuple(map(number, event.over)),
                event.scratch,
                step.seconds,
            )
            for event, step in zip(events, self._steps, strict=True)
        )
        return shape, tuple(sorted((number(s), sizes[s], s in self._lasting) for s in self._before))

    def arrangements(self, most: int) -> list[tuple[list[int], int]]:
        """Sequences with their peaks: the best order of the steps, then ever thriftier ones."""
        sequence = self._ordered(list(range(len(self._steps))))
        peak = self._peak(sequence).bytes
        found = [(sequence, peak)]
        for _ in range(_TRIES):
            thriftier = self._thriftier(sequence) if len(found) <= most else None
            if thriftier is None:
                break
            sequence = self._ordered(thriftier)
            peak = self._peak(sequence).bytes
            if peak < found[-1][1]:
                found.append((sequence, peak))
        return found

    def as_they_come(self) -> list[tuple[list[int], int]]:
        """The steps as they are."""
        sequence = list(range(len(self._steps)))
        return [(sequence, self._peak(sequence).bytes)]

    def _events(self, sequence: Sequence[int]) -> tuple[list[Event], dict[int, int], dict[int, int]]:
        sizes = dict(self._sizes)
        events, _, copied = backward_events(self._graph, [self._steps[p] for p in sequence], sizes, {})
        return events, sizes, copied

    def _peak(self, sequence: Sequence[int]) -> LivePeak:
        events, sizes, _ = self._events(sequence)
        return peak_of(events, sizes, self._before, self._lasting)

    def _ordered(self, sequence: list[int]) -> list[int]:
        """The sequence, or a better order of it."""
        events, sizes, _ = self._events(sequence)
        order, _ = order_events(events, sizes, self._before, self._lasting)
        ordered = [sequence[position] for position in order]
        return ordered if self._peak(ordered).bytes < self._peak(sequence).bytes else sequence

    def _thriftier(self, sequence: list[int]) -> list[int] | None:
        """A sequence in which something that is alive at the peak is dropped before it and made again after it."""
        events, sizes, copied = self._events(sequence)
        peak = peak_of(events, sizes, self._before, self._lasting, list_live=True)
        at = peak.position
        readers: dict[int, list[int]] = {}
        for position, event in enumerate(events):
            for storage in event.reads:
                readers.setdefault(storage, []).append(position)
        best: tuple[int, float, list[int]] | None = None
        for instance, _ in peak.live:
            later = [position for position in readers.get(instance, ()) if position > at]
            if instance not in copied or not later or instance in events[at].makes or at in readers[instance]:
                continue
            position = later[0]
            remade = self._remade(copied[instance], position, sequence, events, readers)
            if remade is None:
                continue
            tried = [*sequence[:position], *remade, *sequence[position:]]
            cost = sum(self._steps[p].seconds for p in remade)
            result = (self._peak(tried).bytes, cost, tried)
            if result[0] <= peak.bytes and (best is None or result[:2] < best[:2]):
                best = result
        return None if best is None else best[2]

    def _remade(
        self,
        storage: int,
        position: int,
        sequence: Sequence[int],
        events: Sequence[Event],
        readers: dict[int, list[int]],
    ) -> list[int] | None:
        """Steps that make a storage again at a position, from what is alive there; ``None``: it takes too many."""
        makers: dict[int, tuple[int, int]] = {}
        for place in range(position):
            step = self._steps[sequence[place]]
            if step.way is not None:
                makers.update({s: (sequence[place], i) for s, i in zip(step.makes, events[place].makes, strict=True)})
        found: list[int] = []

        def make(wanted: int) -> None:
            place, _ = makers[wanted]
            for source in self._steps[place].reads:
                if source in makers:
                    alive = readers.get(makers[source][1], [-1])[-1] >= position
                    if not alive and makers[source][0] not in found:
                        make(source)
            found.append(place)

        make(storage)
        return found if len(found) <= _LONGEST else None


_LONGEST = 12
"""What takes more steps than this to make once more is not dropped."""


def make_schedule(blocks: Blocks, choice: Choice) -> Schedule:
    """Work a choice out: what runs in the backward, in order."""
    graph = blocks.graph
    available = choice.kept | graph.at_hand
    backward = []
    for segment in range(graph.segments - 1, -1, -1):
        steps: list[Step] = []
        wanted = choice.held.get(segment)
        if wanted:
            steps += just_in_time(graph, segment, available, wanted)
            available |= wanted
        steps += blocks.block(segment, available, choice.thrift.get(segment, 0)).steps
        backward.append((segment, steps))
    live = _without_unread(backward)
    return Schedule(choice, live, sum(step.seconds for _, steps in live for step in steps))


def _without_unread(backward: Sequence[tuple[int, Sequence[Step]]]) -> tuple[tuple[int, tuple[Step, ...]], ...]:
    """The steps without those that make again what nobody reads before it is made once more, if at all."""
    read: set[int] = set()
    found = []
    for segment, steps in reversed(backward):
        kept = []
        for step in reversed(steps):
            if step.way is not None and read.isdisjoint(step.makes):
                continue
            read.difference_update(step.makes)
            read.update(step.reads)
            kept.append(step)
        found.append((segment, tuple(reversed(kept))))
    return tuple(reversed(found))


def _crossing_backward(graph: OperationGraph) -> tuple[list[set[int]], list[set[int]]]:
    """By segment, storages of the backward that live when its backward begins; and what of all lives when it ends."""
    born: dict[int, int] = dict.fromkeys(graph.tangents, graph.segments)
    dies: dict[int, int] = {}
    for segment in range(graph.segments - 1, -1, -1):
        for operation in graph.backward[segment]:
            born.update(dict.fromkeys(operation.makes, segment))
            dies.update({s: segment for s in operation.reads if s in born})
    dies.update(dict.fromkeys((*graph.gradients, *graph.tangents), -1))
    entering: list[set[int]] = [set() for _ in range(graph.segments)]
    lasting: list[set[int]] = [set() for _ in range(graph.segments)]
    for storage, birth in born.items():
        death = dies.get(storage, birth)
        for segment in range(max(death, 0), min(birth, graph.segments)):
            entering[segment].add(storage)
        for segment in range(death + 1, min(birth, graph.segments - 1) + 1):
            lasting[segment].add(storage)
    return entering, lasting
