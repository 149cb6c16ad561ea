"""Memory events of emitted programs: a step's operations in the order of the generated code.

A course is followed once, and everything about memory is read off it: the peak of a step
(:mod:`roundpipe_fx.analysis.simulator`), its footprint among other calls, and the memory of each of its stage calls
(:mod:`roundpipe_fx.analysis.stage_calls`). ::

    forward program                     the caller         backward program
    ├─ stage_0 ─┼─ stage_1 ─┼─ … ──────┤ loss ├─ … ─┼─ stage_1 ─┼─ stage_0 ─┤
     one event for each operation    `ends` ^  ^ incoming gradients arrive

Views and in-place writes are followed to their storages (:mod:`roundpipe_fx.analysis.storage_ids`). The planner has no
programs yet: it makes such events of its own operations (:mod:`roundpipe_fx.remat.schedule`).
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx

from roundpipe_fx.analysis.liveness import Event
from roundpipe_fx.analysis.outside_loss import lasting_bytes, loss_bytes
from roundpipe_fx.analysis.storage_ids import OUTSIDE, StorageIds
from roundpipe_fx.codegen import Program, StageModule
from roundpipe_fx.ir.joint_graph import Mark, is_sum, tensor_values
from roundpipe_fx.torch_private import offload_operators

_SWITCHES = (torch.ops.streams.fork.default, torch.ops.streams.join.default)
"""Operators that make another stream the current one: their second operand."""
CALLER = "the caller"
"""Stands for the call that runs while the loss is computed outside the model."""
COPIES = "copies"
"""Stands for the call that copies values to the host and back."""


class FollowedCall(NamedTuple):
    """A call of a stage module.

    Attributes:
        name: name of the stage module.
        reads: storages that are passed in.
        start: number of its first event.
        end: number of the event after its last one.
        returns: for each of its results, its storages.
    """

    name: str
    reads: set[int]
    start: int
    end: int
    returns: list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Course:
    """The events of a forward and a backward program, with a loss between them.

    Attributes:
        backward: the backward program; ``None`` for inference.
        run: the events, with the storages that they read and make.
        ends: number of events of the forward; the next one is the loss.
        results: for each result of the forward, its storages.
        gradients: for each result of the backward, its storages.
        arrived: storages of the incoming gradients.
        lasting: storages that live to the end.
        arriving: storages that are allocated outside the programs, by position of the event that follows.
        outputs: bytes of the forward's outputs.
    """

    forward: Program
    backward: Program | None
    run: ProgramEvents
    ends: int
    results: list[list[int]]
    gradients: list[list[int]]
    arrived: set[int]
    lasting: list[int]
    arriving: dict[int, list[int]]
    outputs: int


def follow_events(
    forward: Program,
    backward: Program | None,
    tangents: Collection[fx.Node] = (),
    granularity: int = 1,
    *,
    released: Collection[int] = (),
    outside: int = 0,
    sums: bool = False,
    follow: Follow | None = None,
) -> Course:
    """Follow both programs once.

    Args:
        backward: the backward program; ``None`` for inference.
        tangents: incoming gradients that the step is expected to get; others are an expanded scalar zero.
        granularity: bytes that the device's allocator rounds sizes up to.
        released: numbers of the results that the caller frees when the forward is over: it copies them into inputs, or
            drops them.
        outside: bytes that are allocated elsewhere from the loss until the backward is over.
        sums: whether the backward finds accumulated gradients of earlier microbatches.
        follow: follows stage modules that were compiled; ``None``: as their operations run one after the other.
    """
    run = ProgramEvents(granularity, follow)
    # The user's inputs and parameters were there before: they are OUTSIDE and count nothing.
    results = run.follow_program(forward, [[OUTSIDE] * len(tensor_values(node)) for node in forward.inputs])
    outputs = results[: forward.outputs]
    lasting = [storage for position, leaves in enumerate(outputs) if position not in released for storage in leaves]
    freed = [storage for position in released for storage in results[position] if storage not in {OUTSIDE, *lasting}]
    loss = 0 if backward is None else loss_bytes(tangents, granularity)
    ends = len(run.events)
    # The moment of the loss: results that the caller drops are freed here.
    run.events.append(Event((CALLER, None), freed, (), workspace=loss))
    arriving: dict[int, list[int]] = {}
    gradients: list[list[int]] = []
    arrived: dict[fx.Node, list[int]] = {}
    if backward is not None:
        saved = {n: leaves for n, leaves in zip(forward.results, results, strict=True) if isinstance(n, fx.Node)}
        # Compiled code makes a new sum and frees the old one; operations add in place.
        # Three cases of running sums: none (the first microbatch), memory outside, or memory that compiled code
        # replaces.
        summed = {
            node: []
            if not sums
            else [OUTSIDE]
            if follow is None
            else [run.numbers.allocate(value) for value in tensor_values(node)]
            for node in backward.inputs
            if is_sum(node)
        }
        arrived = {
            node: [run.numbers.allocate_tangent(value, node in tangents) for value in tensor_values(node)]
            for node in backward.inputs
            if node not in saved and node not in summed
        }
        inputs = {**saved, **summed, **arrived}
        loss_gradient = run.numbers.allocate_bytes(lasting_bytes(tangents, granularity) + outside)
        # What the caller makes arrives between loss and backward: the loss, and the incoming gradients.
        arriving[len(run.events)] = [loss_gradient, *(storage for leaves in arrived.values() for storage in leaves)]
        gradients = run.follow_program(backward, [inputs[node] for node in backward.inputs], held=lasting)
        lasting += [loss_gradient, *(storage for node in tangents for storage in arrived.get(node, ()))]
        lasting += [storage for leaves in gradients for storage in leaves]
    kept = {storage for leaves in outputs for storage in leaves if storage != OUTSIDE} - set(freed)
    return Course(
        forward=forward,
        backward=backward,
        run=run,
        ends=ends,
        results=results,
        gradients=gradients,
        arrived={storage for leaves in arrived.values() for storage in leaves},
        lasting=lasting,
        arriving=arriving,
        outputs=sum(run.numbers.sizes[storage] for storage in kept),
    )


Follow: TypeAlias = Callable[[StageModule, Sequence[Sequence[int]], Collection[int]], "FollowedModule | None"]
"""Follows a stage module, given the storages of its inputs, numbered in the order in which they come in, and the
positions of inputs that nothing refers to but the call; ``None``: it cannot be followed."""


class ProgramEvents:
    """Follows programs and records their operations as events.

    Args:
        granularity: bytes that the device's allocator rounds sizes up to.

    Attributes:
        numbers: the storages, and their sizes.
        events: of all programs so far; each names the stage module and the node.
        makers: by storage, the node that allocates it, or the name of the stage module whose code does.
        calls: the calls of stage modules, in order.
    """

    def __init__(self, granularity: int, follow: Follow | None = None) -> None:
        self._follow = follow
        self.numbers = StorageIds(granularity)
        self.events: list[Event] = []
        self.makers: dict[int, fx.Node | str] = {}
        self.calls: list[FollowedCall] = []
        self._stream = 0

    def follow_program(self, program: Program, inputs: list[list[int]], held: Collection[int] = ()) -> list[list[int]]:
        """Follow a program.

        Args:
            inputs: of each the storages.
            held: storages that others refer to.

        Returns:
            the storages of its results.
        """
        modules = {call.name: call for call in program.calls}
        graph = program.module.graph
        values: dict[fx.Node, list[int]] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
        for node in graph.nodes:
            if node.target in _SWITCHES:
                self._stream = int(node.args[1])
            if node.op == "call_function" and node.target is not operator.getitem:
                self._follow_copy(node, values)
            if node.op != "call_module":
                continue
            arguments: Any = node.args[0]
            dying = _find_dying(node, values, {*held, OUTSIDE}) if self._follow is not None else ()
            results = self._follow_call(modules[str(node.target)], [values[item] for item in arguments], dying)
            for item in node.users:
                if item.op == "call_function" and len(item.args) == 2 and item.args[0] is node:
                    values[item] = results[int(item.args[1])]
        returned: Any = graph.output_node().args[0]
        return [values[item] if isinstance(item, fx.Node) else [] for item in returned]

    def _follow_copy(self, node: fx.Node, values: dict[fx.Node, list[int]]) -> None:
        """Follow a copy to the host, where memory does not count, or back; waits hold what they are given."""
        if not isinstance(node.meta.get("val"), torch.Tensor):  # an operation on streams
            return
        operands = node.all_input_nodes
        allocated: list[int] = []
        values[node] = values[operands[0]]
        copied = offload_operators()
        if copied is not None and node.target is copied.offload.default:
            values[node] = [OUTSIDE]
        elif copied is not None and node.target is copied.reload.default:
            values[node] = allocated = [self.numbers.allocate(node.meta["val"])]
        self.makers.update(dict.fromkeys(allocated, node))
        reads = [storage for operand in operands for storage in values[operand] if storage != OUTSIDE]
        self.events.append(Event((COPIES, node), list(dict.fromkeys(reads)), allocated, stream=self._stream))

    def _follow_call(self, call: StageModule, arguments: list[list[int]], dying: Collection[int]) -> list[list[int]]:
        name, module, start = call.name, call.module, len(self.events)
        storages: dict[int, int] = {}
        # The pattern says which inputs share storages, with local numbers. Equal modules with equal patterns have equal
        # events, so a module is followed once for all layers.
        pattern = tuple(
            [
                tuple([OUTSIDE if s == OUTSIDE else storages.setdefault(s, len(storages)) for s in leaves_of])
                for leaves_of in arguments
            ]
        )
        compiled = self._follow(call, pattern, dying) if self._follow is not None else None
        followed = compiled or _follow_once(module, pattern)
        # Local numbers become numbers of the course: first those of the inputs, then new ones.
        course_number = [*storages, *(self.numbers.allocate_bytes(size) for size in followed.sizes)]
        nodes = [*module.graph.nodes]
        for position, reads, makes, workspace in followed.operations:
            node = nodes[position] if position >= 0 else None
            allocated = [course_number[local] for local in makes]
            for storage in allocated:
                self.makers[storage] = node or name
            event = Event(
                (name, node),
                [course_number[local] for local in reads],
                allocated,
                workspace=workspace,
                stream=self._stream,
            )
            self.events.append(event)
        leaves = [
            [local if local == OUTSIDE else course_number[local] for local in result_leaves]
            for result_leaves in followed.returns
        ]
        if compiled is not None:
            results: Any = module.graph.output_node().args[0]
            for returned, result_leaves in zip(results, leaves, strict=True):
                self.makers.update(dict.fromkeys(set(result_leaves) - {OUTSIDE}, returned))
        self.calls.append(FollowedCall(name, set(storages), start, len(self.events), leaves))
        return leaves


def _find_dying(call: fx.Node, values: Mapping[fx.Node, list[int]], held: Collection[int]) -> list[int]:
    """Find the positions of the arguments of a call that nothing refers to but the call."""
    arguments: Any = call.args[0]
    later = set(held)
    # An input dies in the call if no later node of the program refers to it or to another value of the same memory.
    for value, leaves in values.items():
        if value not in arguments and any(user >= call for user in value.users):
            later.update(leaves)
    count = Counter(storage for item in arguments for storage in set(values[item]))
    return [
        position
        for position, item in enumerate(arguments)
        if all(user <= call for user in item.users)
        and all(storage not in later and count[storage] == 1 for storage in values[item])
    ]


class FollowedOperation(NamedTuple):
    """An operation of a stage module.

    Attributes:
        position: position of its node; -1: it is none of the graph's, but of code that a compiler wrote.
        reads: storages that it reads.
        makes: storages that it allocates.
        workspace: bytes that it allocates beside its results.
    """

    position: int
    reads: list[int]
    makes: list[int]
    workspace: int


class FollowedModule(NamedTuple):
    """A stage module that was followed, with numbers of its own for storages: first of what comes in, then of what it
    allocates.

    Attributes:
        operations: in order. No nodes, which refer to their module: that is forgotten when nobody else has it.
        sizes: bytes of what it allocates.
        returns: for each result, its storages.
    """

    operations: list[FollowedOperation]
    sizes: list[int]
    returns: list[list[int]]


_followed_modules: weakref.WeakKeyDictionary[fx.GraphModule, dict[tuple[tuple[int, ...], ...], FollowedModule]] = (
    weakref.WeakKeyDictionary()
)
"""By stage module, which equal stages share, and by what comes in."""


def _follow_once(module: fx.GraphModule, pattern: tuple[tuple[int, ...], ...]) -> FollowedModule:
    """Follow a stage module; once, if the same storages come in as before.

    Args:
        module: the stage module, as it was emitted.
        pattern: for each argument, its storages, numbered in the order in which they come in.
    """
    by_pattern = _followed_modules.setdefault(module, {})
    if pattern not in by_pattern:
        by_pattern[pattern] = _follow(module, pattern)
    return by_pattern[pattern]


def _follow(module: fx.GraphModule, pattern: tuple[tuple[int, ...], ...]) -> FollowedModule:
    numbers = StorageIds()
    # Inputs get the first local numbers, with no bytes: they belong to whoever made them.
    incoming = 1 + max((storage for incoming_leaves in pattern for storage in incoming_leaves), default=OUTSIDE)
    for _ in range(incoming):
        numbers.allocate_bytes(0)
    arguments = iter(pattern)
    operations: list[FollowedOperation] = []
    for position, node in enumerate(module.graph.nodes):
        if node.op == "placeholder":
            numbers.assign(node, list(next(arguments)))
        elif node.op == "output":
            returned: Any = node.args[0]
            leaves = [list(numbers.get(item)) if isinstance(item, fx.Node) else [] for item in returned]
            return FollowedModule(operations, numbers.sizes[incoming:], leaves)
        else:
            allocated = numbers.follow(node)
            workspace = node.meta.get(Mark.WORKSPACE, 0)
            operations.append(FollowedOperation(position, numbers.reads(node), allocated, workspace))
    raise AssertionError("a graph without an output")
