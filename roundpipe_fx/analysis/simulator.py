"""The simulator: peak bytes of emitted programs, by liveness analysis of storages.

It follows the forward and the backward program call by call and, inside each call, operation by operation, as the
generated code runs them: a value is freed at its last use, an in-place operation allocates nothing, a view keeps its
base alive. Counted is what the step allocates beyond what was allocated when it began: saved values, temporaries, new
gradients, the forward's outputs and incoming gradients, which the caller may hold until the backward is over, and
workspaces of kernels (:mod:`roundpipe_fx.analysis.cost.workspace`). New values of updated inputs (running statistics)
are freed when the forward is over and the caller has copied them. Parameters and the user's inputs do not count. On
CUDA the caching allocator is simulated (:mod:`roundpipe_fx.analysis.caching_allocator`).

Fusion by a stage compiler is not modelled. Data-dependent sizes count with the values assumed for them
(:func:`roundpipe_fx.torch_private.size_hint`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from roundpipe_fx.analysis.caching_allocator import ROUNDED_TO, CachingAllocator
from roundpipe_fx.analysis.cost import tensor_bytes
from roundpipe_fx.analysis.liveness import Event, peak_of
from roundpipe_fx.analysis.outside_loss import lasting_bytes, loss_bytes
from roundpipe_fx.analysis.step_of_calls import Footprint, footprint_of
from roundpipe_fx.analysis.storage_ids import OUTSIDE, StorageIds
from roundpipe_fx.codegen import Program
from roundpipe_fx.ir.joint_graph import Mark, Phase, is_sum, module_path, tensor_values
from roundpipe_fx.torch_private import module_path_text

__all__ = [
    "CallBytes",
    "Course",
    "HeldBytes",
    "LiveValue",
    "PeakMoment",
    "allocation_granularity",
    "course_of",
    "footprint_of_course",
    "peak_of_course",
    "simulate_calls",
    "simulate_programs",
]

_SHOWN = 8
"""Number of live values that are listed at the peak."""
_FIRST_INPUT = -3
"""This and lower numbers stand for the inputs of the forward, for an allocator."""


_SWITCHES = (torch.ops.streams.fork.default, torch.ops.streams.join.default)
"""What makes another stream the current one: the second operand."""


def allocation_granularity(device: torch.device) -> int:
    """Bytes that a device's allocator rounds sizes up to: 512 for CUDA's caching allocator, 1 on the CPU."""
    return ROUNDED_TO if device.type == "cuda" else 1


@dataclass(frozen=True)
class LiveValue:
    """A value that is alive at the peak.

    Attributes:
        name: name in the emitted code.
        module: path of the user's module that computed it.
        bytes: bytes of its storage.
    """

    name: str
    module: str
    bytes: int


_CALLER = "the caller"
"""Stands for the call that runs while the loss is computed outside the model."""


@dataclass(frozen=True)
class PeakMoment:
    """The peak of a step.

    Attributes:
        bytes: bytes allocated at the peak.
        call: the stage module that runs at the peak.
        value: the value that is being computed.
        module: path of the user's module that it belongs to.
        live: the largest values alive at the peak, largest first.
    """

    bytes: int
    call: str
    value: str
    module: str
    live: tuple[LiveValue, ...]


def simulate_programs(
    forward: Program,
    backward: Program | None,
    tangents: Collection[fx.Node] = (),
    granularity: int = 1,
    allocator: CachingAllocator | None = None,
    owners: Collection[int] = (),
    updates: Collection[int] = (),
) -> PeakMoment:
    """The peak of one step.

    Args:
        forward: the forward program.
        backward: the backward program; ``None`` for inference.
        tangents: incoming gradients that the step is expected to get; others are an expanded scalar zero.
        granularity: bytes that the device's allocator rounds sizes up to.
        allocator: a new simulated allocator, if the device has a caching one. The peak is then the higher one of a
            first step and a later one, which finds the blocks that the first has left.
        owners: positions of the inputs that get gradients, which were allocated before the other inputs.
        updates: numbers of the results that the caller copies into inputs and frees when the forward is over.

    Returns:
        the peak, with what is alive then.
    """
    return peak_of_course(course_of(forward, backward, tangents, granularity, updates), allocator, owners)


def peak_of_course(
    course: Course, allocator: CachingAllocator | None = None, owners: Collection[int] = ()
) -> PeakMoment:
    """The peak of a step that has been followed. Arguments as for :func:`simulate_programs`."""
    run, lasting, arriving = course.run, course.lasting, course.arriving
    if allocator is not None:
        inputs = course.forward.inputs
        for index in dict.fromkeys((*owners, *range(len(inputs)))):
            allocator.take(_FIRST_INPUT - index, tensor_bytes(tensor_values(inputs[index])))
    peak = peak_of(run.events, run.numbers.sizes, (), lasting, arriving, True, allocator)
    if allocator is not None:
        for storage in lasting:
            allocator.give_back(storage)
        later = peak_of(run.events, run.numbers.sizes, (), lasting, arriving, True, allocator)
        peak = max(peak, later, key=lambda peak: peak.bytes)
    call, node = run.events[peak.position].what if peak.position >= 0 else ("", None)
    live = [_live(run.makers.get(storage), size) for storage, size in peak.live[:_SHOWN]]
    name, module = (node.name, module_path(node, module_path_text)) if node is not None else ("", "")
    workspace = run.events[peak.position].workspace if peak.position >= 0 else 0
    if node is None and workspace:
        name = "loss"
        live = sorted([*live, LiveValue("loss outside", "", workspace)], key=lambda value: -value.bytes)
    elif workspace:
        live = sorted([*live, LiveValue(f"workspace of {name}", module, workspace)], key=lambda value: -value.bytes)
    return PeakMoment(peak.bytes, call, name, module, tuple(live[:_SHOWN]))


def footprint_of_course(course: Course, owners: Sequence[int | None] = (), beyond: int = 0) -> Footprint:
    """The footprint of one call of a graph.

    Args:
        course: course of its programs.
        owners: for each result of the backward, the number of the input that it is the gradient of.
        beyond: bytes that the device's allocator counts in addition to those simulated here.
    """
    gradients: Counter[int] = Counter()
    for owner, node in zip(owners, course.backward.results if course.backward is not None else (), strict=False):
        if isinstance(node, fx.Node) and owner is not None:
            gradients[owner] += tensor_bytes(tensor_values(node))
    sizes, events = course.run.numbers.sizes, course.run.events
    return footprint_of(
        events, course.ends, sizes, course.lasting, course.arriving, course.outputs, dict(gradients), beyond
    )


@dataclass(frozen=True, kw_only=True)
class Course:
    """The events of a forward and a backward program, with a loss between them.

    Attributes:
        forward: the forward program.
        backward: the backward program; ``None`` for inference.
        run: the simulation, which has the events.
        ends: number of events of the forward; the next one is the loss.
        lasting: storages that live to the end.
        arriving: storages that are allocated outside the programs, by position of the event that follows.
        outputs: bytes of the forward's outputs.
    """

    forward: Program
    backward: Program | None
    run: _CallSimulation
    ends: int
    lasting: list[int]
    arriving: dict[int, list[int]]
    outputs: int


def course_of(
    forward: Program,
    backward: Program | None,
    tangents: Collection[fx.Node] = (),
    granularity: int = 1,
    updates: Collection[int] = (),
    outside: int = 0,
) -> Course:
    """Follow both programs once.

    Arguments as for :func:`simulate_programs`; ``outside``: bytes that are allocated elsewhere from the loss until the
    backward is over.
    """
    run = _CallSimulation(granularity)
    returned = run.program(forward, [[OUTSIDE] * len(tensor_values(node)) for node in forward.inputs])
    kept = (leaves for place, leaves in enumerate(returned[: forward.outputs]) if place not in updates)
    lasting = [storage for leaves in kept for storage in leaves]
    copied = [storage for place in updates for storage in returned[place]]
    loss = 0 if backward is None else loss_bytes(tangents, granularity)
    ends = len(run.events)
    run.events.append(Event((_CALLER, None), copied, (), workspace=loss))
    arriving: dict[int, list[int]] = {}
    if backward is not None:
        given = {
            node: leaves for node, leaves in zip(forward.results, returned, strict=True) if isinstance(node, fx.Node)
        }
        arrived = {
            node: [run.numbers.new_tangent(value, node in tangents) for value in tensor_values(node)]
            for node in backward.inputs
            if node not in given and not is_sum(node)
        }
        loss_gradient = run.numbers.new_of(lasting_bytes(tangents, granularity) + outside)
        arriving[len(run.events)] = [loss_gradient, *(storage for leaves in arrived.values() for storage in leaves)]
        lasting += [loss_gradient, *(storage for node in tangents for storage in arrived.get(node, ()))]
        given = {**given, **arrived}
        lasting += [
            storage
            for leaves in run.program(backward, [given.get(node, []) for node in backward.inputs])
            for storage in leaves
        ]
    outputs = {s for leaves in returned[: forward.outputs] for s in leaves if s != OUTSIDE} - set(copied)
    size = sum(run.numbers.sizes[storage] for storage in outputs)
    return Course(
        forward=forward, backward=backward, run=run, ends=ends, lasting=lasting, arriving=arriving, outputs=size
    )


@dataclass(frozen=True)
class CallBytes:
    """Memory of a call of a stage module, for one microbatch.

    Attributes:
        name: name of the stage module.
        peak: peak bytes that it allocates beyond those that are allocated when it begins, which include accumulated
            gradients of earlier microbatches.
        first_peak: the same for the first microbatch, which finds no accumulated gradients.
        gradients: bytes of the gradients that it returns, keyed by the number of the input they belong to.
        brought: bytes of incoming gradients whose last reader it is.
    """

    name: str
    peak: int
    first_peak: int
    gradients: Mapping[int, int]
    brought: int


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that outlive the call that allocates them.

    Attributes:
        bytes: number of bytes.
        maker: name of the stage module that allocates them.
        readers: names of the stage modules that read them.
        lasts: whether the caller gets and holds them.
    """

    bytes: int
    maker: str
    readers: tuple[str, ...]
    lasts: bool


def simulate_calls(
    forward: Program,
    backward: Program | None,
    owners: Sequence[int | None] = (),
    tangents: Collection[fx.Node] = (),
    granularity: int = 1,
    parameters: Collection[int] = (),
) -> tuple[list[CallBytes], list[HeldBytes]]:
    """Memory of each call of one microbatch's forward and backward, and of the values between calls.

    Gradients do not count as values between calls: those of parameters are accumulated.

    Args:
        forward: the forward program.
        backward: the backward program; ``None`` for inference.
        owners: for each result of the backward, the number of the input that it is the gradient of, or contributes to.
        tangents: incoming gradients that the step is expected to get.
        granularity: bytes that the device's allocator rounds sizes up to.
        parameters: numbers of the inputs that all microbatches share.

    Returns:
        memory of each call, and of the values that outlive the call that computes them.
    """
    first, _ = _simulate_calls(forward, backward, owners, tangents, granularity, ())
    later, held = _simulate_calls(forward, backward, owners, tangents, granularity, parameters)
    calls = [
        CallBytes(at_first.name, then.peak, at_first.peak, at_first.gradients, then.brought)
        for at_first, then in zip(first, later, strict=True)
    ]
    return calls, held


class _Call(NamedTuple):
    name: str
    peak: int
    gradients: Mapping[int, int]
    brought: int


def _simulate_calls(
    forward: Program,
    backward: Program | None,
    owners: Sequence[int | None],
    tangents: Collection[fx.Node],
    granularity: int,
    summed: Collection[int],
) -> tuple[list[_Call], list[HeldBytes]]:
    """As :func:`simulate_calls`, for a microbatch that finds accumulated gradients of the inputs in ``summed``.

    Each call is looked at on its own: it begins with the values that die in it, so these are subtracted from its peak,
    and ends with the values that outlive it and with its gradients. Values that live across the whole call belong to
    the schedule (:mod:`roundpipe_fx.schedules.memory`).
    """
    run = _CallSimulation(granularity)
    returned = run.program(forward, [[OUTSIDE] * len(tensor_values(node)) for node in forward.inputs])
    gradients: dict[str, dict[int, int]] = {}  # by call, the owners by storage
    before_backward = len(run.numbers.sizes)
    arrived: set[int] = set()
    if backward is not None:
        given = {n: leaves for n, leaves in zip(forward.results, returned, strict=True) if isinstance(n, fx.Node)}
        given |= {node: [OUTSIDE] if summed else [] for node in backward.inputs if is_sum(node)}
        inputs = [
            given[node]
            if node in given
            else [run.numbers.new_tangent(value, node in tangents) for value in tensor_values(node)]
            for node in backward.inputs
        ]
        arrived = set(range(before_backward, len(run.numbers.sizes)))
        items: Any = backward.module.graph.output_node().args[0]
        for item, owner, leaves in zip(items, owners, run.program(backward, inputs), strict=True):
            if isinstance(item, fx.Node) and item.op == "call_function" and owner is not None:
                (giver, *_) = item.all_input_nodes
                found = gradients.setdefault(str(giver.target), {})
                found.update(dict.fromkeys(set(leaves) - {OUTSIDE}, owner))
    lasting = {storage for leaves in returned[: forward.outputs] for storage in leaves}
    readers: dict[int, list[int]] = {}
    for index, (_, reads, _) in enumerate(run.calls):
        for storage in reads:
            readers.setdefault(storage, []).append(index)
    sizes = run.numbers.sizes
    calls, held = [], Counter[tuple[str, tuple[str, ...], bool]]()
    found_before = set(summed)
    for index, (name, reads, (start, end)) in enumerate(run.calls):
        # What dies in this call: values that come in, have no later reader, and belong to neither caller nor schedule.
        events = run.events[start:end]
        made = {storage for event in events for storage in event.makes}
        own = gradients.get(name, {})  # another call may have computed them
        dying = {s for s in reads - lasting - arrived if readers[s][-1] == index and not _contested(run, readers[s])}
        outlive = {s for s in made if any(reader > index for reader in readers.get(s, ()))} | (made & lasting)
        for storage in outlive:
            by = tuple(run.calls[reader][0] for reader in readers.get(storage, ()))
            held[name, by, storage in lasting] += sizes[storage]
        # Beyond what is allocated when the call begins, of which these values are a part.
        before = sum(sizes[storage] for storage in dying)
        peak = peak_of(events, sizes, before=dying, lasting=outlive | own.keys()).bytes - before
        grown = sum(sizes[storage] for storage in own)
        # Gradients that the call does not accumulate itself are added one after another, out of place the first time.
        grown += max((sizes[storage] for storage, owner in own.items() if owner in found_before), default=0)
        found_before |= set(own.values())
        left = sum(sizes[storage] for storage in outlive) - before
        brought = sum(sizes[storage] for storage in arrived if readers.get(storage, [-1])[-1] == index)
        by_owner: Counter[int] = Counter()
        for storage, owner in own.items():
            by_owner[owner] += sizes[storage]
        calls.append(_Call(name, max(peak, left + grown, 0), by_owner, brought))
    return calls, [HeldBytes(size, *of) for of, size in held.items()]


def _contested(run: _CallSimulation, readers: list[int]) -> bool:
    """Whether the last reader depends on the schedule, which may delay gradients of parameters."""
    names = [run.calls[reader][0] for reader in readers]
    return len(names) > 1 and any(name.endswith(Phase.WEIGHT) for name in names)


def _live(maker: fx.Node | None, size: int) -> LiveValue:
    if maker is None:
        return LiveValue("incoming gradient", "", size)
    return LiveValue(maker.name, module_path(maker, module_path_text), size)


class _CallSimulation:
    """Follows programs and records their operations as events."""

    def __init__(self, granularity: int) -> None:
        self.numbers = StorageIds(granularity)
        self.events: list[Event] = []
        self.makers: dict[int, fx.Node] = {}
        self._stream = 0
        self.calls: list[tuple[str, set[int], tuple[int, int]]] = []
        """Name, storages that are passed in, and range of events of each call."""

    def program(self, program: Program, inputs: list[list[int]]) -> list[list[int]]:
        """Follow a program on inputs given by their storages; returns the storages of its results."""
        modules = {call.name: call.module for call in program.calls}
        graph = program.module.graph
        values: dict[fx.Node, list[int]] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
        for node in graph.nodes:
            if node.target in _SWITCHES:
                self._stream = int(node.args[1])
            if node.op != "call_module":
                continue
            arguments: Any = node.args[0]
            results = self._call(str(node.target), modules[str(node.target)], [values[item] for item in arguments])
            for item in node.users:
                if item.op == "call_function" and len(item.args) == 2 and item.args[0] is node:
                    values[item] = results[int(item.args[1])]
        returned: Any = graph.output_node().args[0]
        return [values[item] if isinstance(item, fx.Node) else [] for item in returned]

    def _call(self, name: str, module: fx.GraphModule, arguments: list[list[int]]) -> list[list[int]]:
        given = iter(arguments)
        start = len(self.events)
        reads = {storage for leaves in arguments for storage in leaves if storage != OUTSIDE}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.numbers.give(node, next(given))
            elif node.op == "output":
                returned: Any = node.args[0]
                self.calls.append((name, reads, (start, len(self.events))))
                return [list(self.numbers.of(item)) if isinstance(item, fx.Node) else [] for item in returned]
            else:
                made = self.numbers.follow(node)
                self.makers.update(dict.fromkeys(made, node))
                workspace = node.meta.get(Mark.WORKSPACE, 0)
                self.events.append(
                    Event(
                        (name, node), self.numbers.reads(node), made, (), None, workspace=workspace, stream=self._stream
                    )
                )
        raise AssertionError("a graph without an output")
