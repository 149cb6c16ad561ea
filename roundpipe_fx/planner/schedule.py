"""Schedules: the step as a sequence of operations, with forward operations that run again in the backward.

A schedule says everything that decides memory: which forward storages are kept, and for the backward of each segment
which operations run, in which order. Recomputation is *just in time*: a forward operation runs again right before the
first operation of the segment that needs it. What is made again may also be *held* for the backward of earlier
segments, so nested recomputation (the backward runs back to a place, forward again from there, keeping some on the
way) is a set of storages held at some segment and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from roundpipe_fx.liveness import Event, peak_of
from roundpipe_fx.planner.operations import Operation, OperationGraph, Way
from roundpipe_fx.planner.order import order_events
from roundpipe_fx.recomputation import Form

__all__ = [
    "Blocks",
    "Choice",
    "Peak",
    "Schedule",
    "Step",
    "just_in_time",
    "make_schedule",
    "peak_of_forward",
    "simulate",
]


_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of the backward.

    Attributes:
        operation: what runs; a forward operation if ``way`` says how it runs again.
        way: ``None`` for an operation of the backward.
        reads: storages; a forward storage stands for its latest copy, if it has been made again.
        stage: the stage in whose backward it runs.
        stand_in: for a dropout that draws only its mask, the gradient it is drawn for.
    """

    operation: Operation
    way: Way | None
    reads: tuple[int, ...]
    stage: int
    stand_in: fx.Node | None = None

    @property
    def makes(self) -> tuple[int, ...]:
        """Storages that it makes, or makes again."""
        return self.operation.makes if self.way is None else self.way.makes

    @property
    def seconds(self) -> float:
        """Modelled seconds of recomputation: 0 for an operation of the backward."""
        return 0.0 if self.way is None else self.way.seconds


@dataclass(frozen=True)
class Choice:
    """What is kept, and what is made again and held, and when.

    Attributes:
        kept: forward storages kept from the forward on.
        held: by segment, forward storages that are made again just before its backward, for it and earlier ones.
    """

    kept: frozenset[int]
    held: Mapping[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Schedule:
    """A choice worked out.

    Attributes:
        choice: what it was made from; ``kept`` without what nobody reads.
        backward: the steps of each segment's backward, last segment first.
        seconds: modelled seconds of what runs again.
    """

    choice: Choice
    backward: tuple[tuple[int, tuple[Step, ...]], ...]
    seconds: float


@dataclass(frozen=True)
class Peak:
    """The most bytes that live at one time.

    Attributes:
        bytes: how many.
        segment: where: the segment whose operation runs then.
        backward: whether that is in its backward.
        operation: the operation.
        live: names and bytes of the largest storages alive then.
    """

    bytes: int
    segment: int
    backward: bool
    operation: Operation | None
    live: tuple[tuple[str, int], ...]


def just_in_time(
    graph: OperationGraph, segment: int, available: Collection[int], wanted: Collection[int] | None = None
) -> list[Step]:
    """A segment's backward, with forward operations that run again right before they are needed.

    Args:
        graph: the operations.
        segment: whose backward.
        available: forward storages that need not be made again.
        wanted: make these forward storages again, and nothing else.
    """
    operations = graph.backward[segment] if wanted is None else ()
    wanted = wanted or ()
    stage = graph.stages[segment]
    steps: list[Step] = []
    made: set[int] = set()
    needed = _closure(graph, operations, available, wanted)

    def make(storage: int, reader: Operation | None) -> None:
        pending = [(storage, reader, False)]
        while pending:
            current, asking, ready = pending.pop()
            if current in made or current in available or not graph.is_forward(current):
                continue
            way = graph.ways[current]
            stand_in = None
            if asking is not None and current in graph.alone and needed.isdisjoint(set(way.makes) - {current}):
                stand_in = graph.stand_ins.get((current, asking.index))
                way = graph.alone[current] if stand_in is not None else way
            if not ready:
                pending.append((current, asking, True))
                pending += [(source, None, False) for source in reversed(way.reads)]
                continue
            reads = way.reads
            if stand_in is not None and asking is not None:
                reads = tuple(s for s in asking.reads if s != current)
            steps.append(Step(way.operation, way, reads, stage, stand_in))
            made.update(way.makes)

    for storage in sorted(wanted):
        make(storage, None)
    for operation in operations:
        for storage in operation.reads:
            make(storage, operation)
        steps.append(Step(operation, None, operation.reads, stage))
    return steps


def _closure(
    graph: OperationGraph, operations: Sequence[Operation], available: Collection[int], wanted: Collection[int]
) -> set[int]:
    """Forward storages that are read again by the backward or by what runs again for it, masks drawn alone apart."""
    found: set[int] = set()
    pending = list(wanted)
    for operation in operations:
        pending += operation.reads
    while pending:
        storage = pending.pop()
        if storage in found or storage in available or not graph.is_forward(storage):
            continue
        found.add(storage)
        if storage not in graph.alone:
            pending += graph.ways[storage].reads
    return found


class Blocks:
    """Backwards of segments, each in an order with a low peak; those that are alike are ordered once."""

    def __init__(self, graph: OperationGraph) -> None:
        self.graph = graph
        self.entering, self.lasting = _crossing_backward(graph)
        self._orders: dict[Any, tuple[list[int], int]] = {}
        self._blocks: dict[Any, tuple[list[Step], int]] = {}

    def block(self, segment: int, available: Collection[int]) -> tuple[list[Step], int]:
        """A segment's backward.

        Args:
            segment: whose.
            available: forward storages that need not be made again.

        Returns:
            its steps; and the peak bytes while they run, where of what lives from before only the segment's own
            forward storages are counted.
        """
        graph = self.graph
        steps = just_in_time(graph, segment, available)
        known = (segment, tuple((step.operation.index, step.way.form if step.way else None) for step in steps))
        if known not in self._blocks:
            self._blocks[known] = self._in_order(segment, steps)
        return self._blocks[known]

    def _in_order(self, segment: int, steps: list[Step]) -> tuple[list[Step], int]:
        graph = self.graph
        made = {storage for step in steps for storage in step.makes}
        read = {storage for step in steps for storage in step.reads}
        own = {s for s in read - made if graph.is_forward(s) and graph.segment_of[s] == segment}
        entering = self.entering[segment]
        before, lasting = (own | entering) & read, self.lasting[segment]
        sizes = list(graph.sizes)
        events, _, _ = _backward_events(graph, steps, sizes, {})
        given = peak_of(events, sizes, before, lasting).bytes
        key = _structure(events, sizes, before, lasting)
        if key not in self._orders:
            order, peak = order_events(events, sizes, before, lasting)
            self._orders[key] = (order, peak) if peak < given else (list(range(len(steps))), given)
        order, peak = self._orders[key]
        credit = sum(sizes[storage] for storage in entering & read)
        return [steps[position] for position in order], peak - credit


def _structure(events: Sequence[Event], sizes: Sequence[int], before: Collection[int], lasting: Collection[int]) -> Any:
    """Equal for sequences of events that are alike but for the numbers of their storages."""
    numbers: dict[int, int] = {}
    own = set(before).union(*(event.makes for event in events))

    def number(storage: int) -> int:
        return numbers.setdefault(storage, len(numbers)) if storage in own else -1

    shape = tuple(
        (
            tuple(map(number, event.reads)),
            tuple((number(s), sizes[s], s in lasting) for s in event.makes),
            tuple(map(number, event.over)),
            event.scratch,
        )
        for event in events
    )
    return shape, tuple(sorted((number(s), sizes[s], s in lasting) for s in before))


def _crossing_backward(graph: OperationGraph) -> tuple[list[set[int]], list[set[int]]]:
    """By segment, storages of the backward that live when its backward begins; and what of all lives when it ends."""
    born: dict[int, int] = dict.fromkeys(graph.tangents, graph.segments)
    dies: dict[int, int] = {}
    for segment in range(graph.segments - 1, -1, -1):
        for operation in graph.backward[segment]:
            born.update(dict.fromkeys(operation.makes, segment))
            dies.update({s: segment for s in operation.reads if s in born})
    dies.update(dict.fromkeys(graph.gradients, -1))
    entering: list[set[int]] = [set() for _ in range(graph.segments)]
    lasting: list[set[int]] = [set() for _ in range(graph.segments)]
    for storage, birth in born.items():
        death = dies.get(storage, birth)
        for segment in range(max(death, 0), min(birth, graph.segments)):
            entering[segment].add(storage)
        for segment in range(death + 1, min(birth, graph.segments - 1) + 1):
            lasting[segment].add(storage)
    return entering, lasting


def make_schedule(blocks: Blocks, choice: Choice) -> Schedule:
    """Work a choice out: what runs in the backward, in order."""
    graph = blocks.graph
    available = choice.kept | graph.at_hand
    backward = []
    seconds = 0.0
    for segment in range(graph.segments - 1, -1, -1):
        steps = []
        wanted = choice.held.get(segment)
        if wanted:
            steps += just_in_time(graph, segment, available, wanted)
            available |= wanted
        steps += blocks.block(segment, available)[0]
        seconds += sum(step.seconds for step in steps)
        backward.append((segment, tuple(steps)))
    return Schedule(choice, tuple(backward), seconds)


def simulate(graph: OperationGraph, schedule: Schedule) -> Peak:
    """The most bytes that live at one time while a schedule runs, from its forward's beginning to its backward's end.

    What the caller gets — the forward's outputs and the gradients — lives to the end.
    """
    repeated = {
        step.operation.index
        for _, steps in schedule.backward
        for step in steps
        if step.way is not None and step.operation.index in graph.states
    }
    sizes = list(graph.sizes)
    states: dict[int, int] = {}
    events = _forward_events(graph.forward)
    for event in events:
        if event.what.index in repeated:
            states[event.what.index] = len(sizes)
            event.makes.append(len(sizes))
            sizes.append(graph.states[event.what.index])
    steps = [step for _, block in schedule.backward for step in block]
    backward, latest, copied = _backward_events(graph, steps, sizes, states)
    lasting = {*graph.outputs, *(latest.get(storage, storage) for storage in graph.gradients)}
    arriving = {len(events): graph.tangents}
    events += backward
    peak = peak_of(events, sizes, lasting=lasting, arriving=arriving)
    if peak.position < 0:
        return Peak(peak.bytes, 0, False, None, ())
    event = events[peak.position]
    live = tuple((_name(graph, copied.get(storage, storage)), size) for storage, size in peak.live[:_SHOWN])
    return Peak(peak.bytes, event.what.segment, event.room[1], event.what, live)


def _name(graph: OperationGraph, storage: int) -> str:
    if storage in graph.values:
        return graph.values[storage].name
    return "incoming gradient" if storage in graph.tangents else "gradient"


def peak_of_forward(graph: OperationGraph, operations: Iterable[Operation], lasting: Collection[int]) -> int:
    """Peak bytes while forward operations run, what they read from outside not counted; ``lasting`` is held."""
    return peak_of(_forward_events(operations), graph.sizes, lasting=lasting).bytes


def _forward_events(operations: Iterable[Operation]) -> list[Event]:
    return [Event(o, list(o.reads), list(o.makes), o.over, (o.stage, False)) for o in operations]


def _backward_events(
    graph: OperationGraph, steps: Iterable[Step], sizes: list[int], states: Mapping[int, int]
) -> tuple[list[Event], dict[int, int], dict[int, int]]:
    """Steps with copies of a storage told apart: a copy is numbered after the storages, ``sizes`` is extended.

    Returns:
        the events; by storage its latest copy; and by copy the storage.
    """
    events = []
    latest: dict[int, int] = {}
    copied: dict[int, int] = {}
    for step in steps:
        reads = [latest.get(storage, storage) for storage in step.reads]
        operation, way = step.operation, step.way
        over = tuple(latest.get(storage, storage) for storage in operation.over)
        if way is None:
            makes = list(operation.makes)
            events.append(Event(operation, reads, makes, over, (operation.stage, True)))
            continue
        if operation.index in states:
            reads.append(states[operation.index])
        makes = []
        for storage in way.makes:
            latest[storage] = len(sizes)
            copied[len(sizes)] = storage
            makes.append(len(sizes))
            sizes.append(graph.sizes[storage])
        over = over if way.form is Form.SAME else ()
        events.append(Event(operation, reads, makes, over, (step.stage, True), way.scratch))
    return events, latest, copied
