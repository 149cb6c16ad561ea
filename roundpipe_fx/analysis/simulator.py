"""The simulator: peak bytes of emitted programs, by liveness over storages.

It follows the forward and the backward program call by call and, inside each call, operation by operation, as the
generated code runs them: a value dies at its last use, an in-place operation makes nothing, a view holds what it views.
What lives at the same time is what the step allocates beyond what was there when it began: saved values, temporaries,
new gradients, the forward's outputs and the incoming gradients, which the caller may hold until the backward is over,
and what kernels need for themselves (:mod:`roundpipe_fx.analysis.cost.workspace`). New values of inputs that are
updated (running statistics) die when the forward is over and the caller has copied them. Parameters and the user's
inputs were there before. On CUDA what the allocator counts is followed
(:mod:`roundpipe_fx.analysis.caching_allocator`).

Not seen: what a stage compiler fuses away. Sizes that depend on data count
with what is assumed for them (:func:`roundpipe_fx.torch_private.size_hint`).
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
_FIRST_INPUT = -3
"""With the numbers below: what the forward is given, for an allocator."""


_SWITCHES = (torch.ops.streams.fork.default, torch.ops.streams.join.default)
"""What makes another stream the current one: the second operand."""


def allocation_granularity(device: torch.device) -> int:
    """What sizes are rounded up to on a device, in bytes: 512 by CUDA's caching allocator, 1 on the CPU."""
    return ROUNDED_TO if device.type == "cuda" else 1


@dataclass(frozen=True)
class LiveValue:
    """A value that is alive at the peak.

    Attributes:
        name: in the emitted code.
        module: path of the user's module that made it.
        bytes: of its storage.
    """

    name: str
    module: str
    bytes: int


_CALLER = "the caller"
"""What runs while the loss is computed outside."""


@dataclass(frozen=True)
class PeakMoment:
    """When a step holds the most bytes.

    Attributes:
        bytes: how many.
        call: the stage module that runs then.
        value: the value that is being made.
        module: path of the user's module that it belongs to.
        live: the largest values alive then, largest first.
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
        tangents: incoming gradients that a step brings; others are a single zero.
        granularity: what the device's allocator rounds sizes up to, in bytes.
        allocator: a fresh one, if the device's counts more than that. Then the peak is the higher one of a first step
            and a later one, which finds the pieces that the first has left.
        owners: places of the inputs that get gradients, which were there before the others were.
        updates: numbers of the results that the caller copies into inputs, and drops, when the forward is over.
    """
    return peak_of_course(course_of(forward, backward, tangents, granularity, updates), allocator, owners)


def peak_of_course(
    course: Course, allocator: CachingAllocator | None = None, owners: Collection[int] = ()
) -> PeakMoment:
    """The peak of one step; the arguments are those of :func:`simulate_programs`."""
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
    """What one call does to memory.

    Args:
        course: of its programs.
        owners: for each of the backward's results, the number of the input whose gradient it is.
        beyond: bytes that the device's allocator counts beyond what is simulated here.
    """
    gradients: Counter[int] = Counter()
    for owner, node in zip(owners, course.backward.results if course.backward is not None else (), strict=False):
        if isinstance(node, fx.Node) and owner is not None:
            gradients[owner] += tensor_bytes(tensor_values(node))
    sizes, events = course.run.numbers.sizes, course.run.events
    return footprint_of(
        events, course.ends, sizes, course.lasting, course.arriving, course.outputs, dict(gradients), beyond
    )


@dataclass(frozen=True)
class Course:
    """What happens when a forward and a backward program run, with a loss between them.

    Attributes:
        forward: the forward program.
        backward: the backward program; ``None`` for inference.
        run: with the events.
        ends: how many of them the forward has; the next one is the loss.
        lasting: storages that live to the end.
        arriving: storages that others make, by position.
        outputs: bytes of what the forward returns.
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
) -> Course:
    """Follow both programs once; the arguments are those of :func:`simulate_programs`."""
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
        outside = run.numbers.new_of(lasting_bytes(tangents, granularity))
        arriving[len(run.events)] = [outside, *(storage for leaves in arrived.values() for storage in leaves)]
        lasting += [outside, *(storage for node in tangents for storage in arrived.get(node, ()))]
        given = {**given, **arrived}
        lasting += [
            storage
            for leaves in run.program(backward, [given.get(node, []) for node in backward.inputs])
            for storage in leaves
        ]
    outputs = {s for leaves in returned[: forward.outputs] for s in leaves if s != OUTSIDE} - set(copied)
    size = sum(run.numbers.sizes[storage] for storage in outputs)
    return Course(forward, backward, run, ends, lasting, arriving, size)


@dataclass(frozen=True)
class CallBytes:
    """What a call of a stage module does to its device's memory, for one microbatch.

    Attributes:
        name: of the stage module.
        peak: most bytes that it allocates at one time beyond those that are there when it begins, sums of earlier
            microbatches' gradients among them.
        first_peak: the same where there are no sums yet.
        gradients: bytes of the gradients that it returns, by the number of the input whose they are.
        brought: bytes of incoming gradients that it is the last to read.
    """

    name: str
    peak: int
    first_peak: int
    gradients: Mapping[int, int]
    brought: int


@dataclass(frozen=True)
class HeldBytes:
    """What outlives the call that makes it.

    Attributes:
        bytes: how many.
        maker: name of the stage module that makes it.
        readers: names of those that read it.
        lasts: whether the caller gets and keeps it.
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
    """What each call of one microbatch's forward and backward does to memory, and what stays from one to another.

    Gradients are not held: those of parameters are added to those of earlier microbatches. The arguments are those of
    :func:`simulate_programs`, ``owners``: for each of the backward's results, the number of the input that it is
    the gradient of, or a part of it, if any; and ``parameters``: the numbers of those that all microbatches share.
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
    """The same for a microbatch that finds sums of the gradients of these inputs."""
    run = _CallSimulation(granularity)
    returned = run.program(forward, [[OUTSIDE] * len(tensor_values(node)) for node in forward.inputs])
    gradients: dict[str, dict[int, int]] = {}  # by call, the storages with their owners
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
        events = run.events[start:end]
        made = {storage for event in events for storage in event.makes}
        own = gradients.get(name, {})  # it may be another call that has made them
        dying = {s for s in reads - lasting - arrived if readers[s][-1] == index and not _contested(run, readers[s])}
        outlive = {s for s in made if any(reader > index for reader in readers.get(s, ()))} | (made & lasting)
        for storage in outlive:
            by = tuple(run.calls[reader][0] for reader in readers.get(storage, ()))
            held[name, by, storage in lasting] += sizes[storage]
        before = sum(sizes[storage] for storage in dying)
        peak = peak_of(events, sizes, before=dying, lasting=outlive | own.keys()).bytes - before
        grown = sum(sizes[storage] for storage in own)
        # What the call has not added is added one after another, the first time into a new place.
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
    """Whether it depends on the schedule who is the last to read: a gradient of parameters may be put off."""
    names = [run.calls[reader][0] for reader in readers]
    return len(names) > 1 and any(name.endswith(Phase.WEIGHT) for name in names)


def _live(maker: fx.Node | None, size: int) -> LiveValue:
    if maker is None:
        return LiveValue("incoming gradient", "", size)
    return LiveValue(maker.name, module_path(maker, module_path_text), size)


class _CallSimulation:
    """What happens when programs run, as events."""

    def __init__(self, granularity: int) -> None:
        self.numbers = StorageIds(granularity)
        self.events: list[Event] = []
        self.makers: dict[int, fx.Node] = {}
        self._stream = 0
        self.calls: list[tuple[str, set[int], tuple[int, int]]] = []
        """Name, storages that come in, and range of events of each call."""

    def program(self, program: Program, inputs: list[list[int]]) -> list[list[int]]:
        """Run a program on inputs given by their storages; those of its results."""
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
                    Event((name, node), self.numbers.reads(node), made, (), None, workspace, self._stream)
                )
        raise AssertionError("a graph without an output")
