"""Schedules: the step as a sequence of operations, with forward operations that are recomputed in the backward.

A schedule says everything that decides memory: which forward storages are kept, and for the backward of each segment
which operations run, in which order. Recomputation is *just in time*: a forward operation is recomputed right before
the first operation of the segment that needs it. A recomputed storage may also be *held* for the backward of earlier
segments, so nested recomputation (the backward returns to a segment, reruns the forward from there, and keeps some
values on the way) is just a set of storages held at some segment. ::

    kept: x0 x2                forward   0 1 2 3
    backward of 3, 2           recompute from x2
    backward of 1              recompute x1 from x0, hold x1 …
    backward of 0              … which this backward reads too
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from roundpipe_fx.analysis.liveness import Event, find_peak, levels_of
from roundpipe_fx.analysis.operations import Operation, OperationGraph, PlannedOp
from roundpipe_fx.analysis.recomputation import Form
from roundpipe_fx.analysis.remat_schedule import BackwardOp, RematBlock, RematSchedule
from roundpipe_fx.analysis.step_of_calls import Footprint, compute_footprint
from roundpipe_fx.ir.joint_graph import Phase

_SHOWN = 6
_LOSS = -2
"""Stands for the storages of a loss outside and its gradient."""


@dataclass(frozen=True)
class RematChoice:
    """The values that are saved, and those that are recomputed and held, and when.

    Attributes:
        kept: forward storages saved from the forward on.
        held: by segment, forward storages that are recomputed just before its backward, for it and earlier ones.
        remat_level: by segment, how many times recomputed storages of its backward are dropped and recomputed once
            more.
    """

    kept: frozenset[int]
    held: Mapping[int, frozenset[int]] = field(default_factory=dict)
    remat_level: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedSchedule:
    """The schedule that follows from a choice.

    Attributes:
        choice: the choice; ``kept`` without storages that are never read.
        backward: the steps of each segment's backward, last segment first.
        seconds: modelled seconds of recomputation.
    """

    choice: RematChoice
    backward: tuple[tuple[int, tuple[PlannedOp, ...]], ...]
    seconds: float


@dataclass(frozen=True)
class Peak:
    """The most bytes that live at one time.

    Attributes:
        segment: where: the segment whose operation runs then.
        backward: whether that is in its backward.
        operation: the operation; ``None``: nothing runs, or between forward and backward the loss outside.
        live: names and bytes of the largest storages alive then.
    """

    bytes: int
    segment: int
    backward: bool
    operation: Operation | None
    live: tuple[tuple[str, int], ...]


def recompute_just_in_time(
    graph: OperationGraph, segment: int, available: Collection[int], wanted: Collection[int] | None = None
) -> list[PlannedOp]:
    """A segment's backward, with forward operations that are recomputed right before they are needed.

    Args:
        available: forward storages that need not be recomputed.
        wanted: recompute these forward storages, and nothing else.
    """
    operations = graph.backward[segment] if wanted is None else ()
    wanted = wanted or ()
    stage = graph.stages[segment]
    steps: list[PlannedOp] = []
    allocated: set[int] = set()
    needed = _find_recomputed(graph, operations, available, wanted)

    def make(storage: int, reader: Operation | None) -> None:
        # A stack, since recursion would be as deep as the model. Each storage is on it twice: for its sources, then for
        # itself.
        pending = [(storage, reader, False)]
        while pending:
            # Available storages include those that earlier blocks recomputed and hold.
            current, asking, ready = pending.pop()
            if current in allocated or current in available or not graph.is_forward(current):
                continue
            recipe = graph.recipes[current]
            rng_shape_source = None
            # Only the mask is drawn if nothing else of the dropout is needed: its other result (the product) is left
            # out, and with it its operand.
            if asking is not None and current in graph.mask_only and needed.isdisjoint(set(recipe.makes) - {current}):
                rng_shape_source = graph.rng_shape_sources.get((current, asking.index))
                recipe = graph.mask_only[current] if rng_shape_source is not None else recipe
            if not ready:
                pending.append((current, asking, True))
                pending += [(source, None, False) for source in reversed(recipe.reads)]
                continue
            reads = recipe.reads
            if rng_shape_source is not None and asking is not None:
                reads = tuple(s for s in asking.reads if s != current)
            steps.append(
                PlannedOp(
                    operation=recipe.operation,
                    recipe=recipe,
                    reads=reads,
                    stage=stage,
                    rng_shape_source=rng_shape_source,
                )
            )
            allocated.update(recipe.makes)

    # What earlier segments hold (`wanted`) is made first; it is the nested part of the recomputation.
    for storage in sorted(wanted):
        make(storage, None)
    for operation in operations:
        for storage in operation.reads:
            make(storage, operation)
        steps.append(PlannedOp(operation=operation, recipe=None, reads=operation.reads, stage=stage))
    return steps


def _find_recomputed(
    graph: OperationGraph, operations: Sequence[Operation], available: Collection[int], wanted: Collection[int]
) -> set[int]:
    """Forward storages that the backward or a recomputation for it reads, except where only a mask is drawn."""
    closure: set[int] = set()
    pending = list(wanted)
    for operation in operations:
        pending += operation.reads
    while pending:
        storage = pending.pop()
        if storage in closure or storage in available or not graph.is_forward(storage):
            continue
        closure.add(storage)
        if storage not in graph.mask_only:
            pending += graph.recipes[storage].reads
    return closure


def simulate(graph: OperationGraph, schedule: PlannedSchedule, list_live: bool = False) -> Peak:
    """The most bytes that live at one time while a schedule runs, from its forward's beginning to its backward's end.

    What the caller gets — the forward's outputs and the gradients — lives to the end, and so do the incoming gradients,
    which the caller may hold. Results that the caller copies into inputs die when the forward is over. Where a step
    makes several calls, the bytes are those of the whole step, while the storages listed are those of this call only.

    Args:
        list_live: whether to say what lives at the peak.
    """
    course = _follow_schedule(graph, schedule)
    events, sizes = course.events, course.sizes
    # `arriving` storages are made outside: incoming gradients, the loss's, saved states of generators.
    peak = find_peak(events, sizes, (), course.lasting, course.arriving, list_live)
    size = peak.bytes if graph.step is None else graph.step.peak(_footprint(graph, course))
    if peak.position < 0:
        return Peak(size, 0, False, None, ())
    event = events[peak.position]
    live = [(name_of(graph, course.copied.get(storage, storage)), size) for storage, size in peak.live[:_SHOWN]]
    # No operation runs at the position between forward and backward: it is the loss outside the model.
    if event.description is None:
        live = sorted([*live, ("loss outside", event.workspace)], key=lambda value: -value[1])
        return Peak(size, graph.segments - 1, True, None, tuple(live[:_SHOWN]))
    if event.workspace:
        live = sorted(
            [*live, (f"workspace of {event.description.node.name}", event.workspace)], key=lambda value: -value[1]
        )
    backward = event.reuse_scope[1] is not Phase.FORWARD
    return Peak(size, event.description.segment, backward, event.description, tuple(live[:_SHOWN]))


def levels_of_schedule(graph: OperationGraph, schedule: PlannedSchedule) -> list[int]:
    """The bytes alive while each operation runs in one call: of the forward, then the loss outside, of the backward."""
    course = _follow_schedule(graph, schedule)
    return [during for during, _ in levels_of(course.events, course.sizes, course.lasting, course.arriving)]


def footprint(graph: OperationGraph, schedule: PlannedSchedule) -> Footprint:
    """The memory footprint of one call that runs a schedule, gradients left out."""
    return _footprint(graph, _follow_schedule(graph, schedule))


def _footprint(graph: OperationGraph, course: _Course) -> Footprint:
    outputs = sum(graph.sizes[storage] for storage in graph.outputs)
    lasting = tuple(course.lasting)
    return compute_footprint(course.events, len(graph.forward), course.sizes, lasting, course.arriving, outputs, {})


@dataclass(frozen=True)
class _Course:
    """The events of a schedule.

    Attributes:
        events: of the forward, the loss outside, and of the backward.
        sizes: bytes by storage, copies among them.
        arriving: storages that others make, by position.
        lasting: storages that live to the end.
        copied: by copy, the storage.
    """

    events: list[Event]
    sizes: dict[int, int]
    arriving: dict[int, Sequence[int]]
    lasting: set[int]
    copied: dict[int, int]


def _follow_schedule(graph: OperationGraph, schedule: PlannedSchedule) -> _Course:
    steps = [step for _, block in schedule.backward for step in block]
    sizes = dict(enumerate(graph.sizes))
    sizes[_LOSS] = graph.loss_lasts
    # A generator's state is saved by the forward operation that is replayed, and read by each replay.
    states = {step.operation.index for step in steps if step.recipe is not None} & graph.states.keys()
    sizes.update((-3 - index, graph.states[index]) for index in states)
    arriving: dict[int, Sequence[int]] = {index: [-3 - index] for index in states}
    arriving[len(graph.forward) + 1] = [*graph.tangents, _LOSS]
    # Copies of inputs that are updated later, and states of generators, are read by the steps that need the old value.
    besides: dict[int, Sequence[int]] = {}
    for position, step in enumerate(steps) if states or graph.snapshots else ():
        replays = step.recipe is not None and step.operation.index in states
        besides[position] = (*_snapshots(graph, step), *([-3 - step.operation.index] if replays else ()))
    taken = dict.fromkeys(copy for read in besides.values() for copy in read if copy >= 0)
    arriving[0] = [*arriving.get(0, ()), *taken]
    backward, latest, copied = backward_events(graph, steps, sizes, besides)
    if any(step.early for step in steps):
        backward = _move_early_first(backward)
    lasting = {_LOSS, *graph.outputs, *graph.held, *(latest.get(storage, storage) for storage in graph.gradients)}
    loss = Event(None, tuple(graph.released), (), workspace=graph.loss)
    return _Course([*graph.forward_events, loss, *backward], sizes, arriving, lasting, copied)


def _snapshots(graph: OperationGraph, step: PlannedOp) -> tuple[int, ...]:
    """Copies of updated inputs that an operation reads in the backward."""
    mask_only = step.recipe is not None and step.recipe.form is Form.MASK
    return () if mask_only else graph.snapshots.get(step.operation.index, ())


def _move_early_first(events: Sequence[Event]) -> list[Event]:
    # Emitted programs call the recompute module of a stage before its backward module, whatever the planned order
    # within the stage.
    """The events of a backward in the order of the programs: of each stage first those of its recompute module."""
    by_stage: dict[int, tuple[list[Event], list[Event]]] = {}
    for event in events:
        stage, module = event.reuse_scope
        by_stage.setdefault(stage, ([], []))[module is Phase.BACKWARD].append(event)
    return [event for modules in by_stage.values() for module in modules for event in module]


def peaks_by_stage(graph: OperationGraph, schedule: PlannedSchedule) -> tuple[int, dict[int, int]]:
    """The most bytes that live at one time in one call; and for each stage while its backward runs."""
    course = _follow_schedule(graph, schedule)
    peaks: dict[int, int] = {}
    levels = levels_of(course.events, course.sizes, course.lasting, course.arriving)
    for event, (during, _) in list(zip(course.events, levels, strict=True))[len(graph.forward) + 1 :]:
        peaks[event.reuse_scope[0]] = max(peaks.get(event.reuse_scope[0], 0), during)
    return max((during for during, _ in levels), default=0), peaks


def remat_schedule(graph: OperationGraph, schedule: PlannedSchedule) -> RematSchedule:
    """A schedule in terms of the nodes of the graph that the operations were read off."""
    blocks = []
    for segment, steps in schedule.backward:
        ops = (
            BackwardOp(step.operation.node, early=step.early)
            if step.recipe is None
            else BackwardOp(step.recipe.node, step.recipe.form, step.early, step.rng_shape_source)
            for step in steps
        )
        blocks.append(RematBlock(segment, graph.stages[segment], tuple(ops)))
    return RematSchedule(tuple(blocks))


def name_of(graph: OperationGraph, storage: int) -> str:
    """The name of a storage in messages."""
    if storage in graph.values:
        return graph.values[storage].name
    if storage == _LOSS:
        return "loss outside"
    return "incoming gradient" if storage in graph.tangents else "gradient"


def peak_of_forward(graph: OperationGraph, operations: Iterable[Operation], lasting: Collection[int]) -> int:
    """Peak bytes while forward operations run, what they read from outside not counted; ``lasting`` is held."""
    events = [graph.forward_events[operation.index] for operation in operations]
    return find_peak(events, graph.sizes, lasting=lasting).bytes


def backward_events(
    graph: OperationGraph,
    steps: Iterable[PlannedOp],
    sizes: dict[int, int],
    besides: Mapping[int, Sequence[int]] | None = None,
) -> tuple[list[Event], dict[int, int], dict[int, int]]:
    """Steps in which each copy of a storage has its own number, after those of the storages; ``sizes`` is extended.

    Args:
        besides: by position of a step, storages that it reads and that no operation makes.

    Returns:
        the events; by storage its latest copy; and by copy the storage.
    """
    events = []
    latest: dict[int, int] = {}
    copied: dict[int, int] = {}
    number = len(graph.sizes)
    # Every recomputation makes a new copy with a number of its own, so that two lifetimes of one storage are two
    # storages for the simulation.
    for position, step in enumerate(steps):
        operation, recipe = step.operation, step.recipe
        reuse_scope = (step.stage, Phase.RECOMPUTE if step.early else Phase.BACKWARD)
        reads, inplace_candidates = list(step.reads), operation.inplace_candidates
        # Readers read the latest copy.
        if not latest.keys().isdisjoint(reads):
            reads = [latest.get(storage, storage) for storage in reads]
            inplace_candidates = tuple([latest.get(storage, storage) for storage in inplace_candidates])
        reads += besides.get(position, ()) if besides else ()
        if recipe is None:
            events.append(
                Event(operation, reads, operation.makes, inplace_candidates, reuse_scope, workspace=operation.workspace)
            )
            continue
        makes = []
        for storage in recipe.makes:
            latest[storage] = number
            copied[number] = storage
            sizes[number] = graph.sizes[storage]
            makes.append(number)
            number += 1
        # A recomputation in another form (a gather, a mask) is another kernel, which cannot write over the operands of
        # the original.
        inplace_candidates = inplace_candidates if recipe.form is Form.SAME else ()
        events.append(Event(operation, reads, makes, inplace_candidates, reuse_scope, workspace=recipe.workspace))
    return events, latest, copied
