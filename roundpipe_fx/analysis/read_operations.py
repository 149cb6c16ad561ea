"""Operations and storages, read off a joint graph with segments and stages.

Storages are numbered as they are met: incoming gradients, then results in the order of the forward, then those of the
backward, last segment first. Parameters and the user's inputs are ``OUTSIDE``: their bytes are not counted::

    node                           operation   reads    makes
    w, v, x: inputs                                               OUTSIDE
    dy: an incoming gradient                                      s0, which no operation makes
    mm = x @ w                     0                    s1
    view = mm.view(2, 3, 4)                                       the same storage, s1: a view is no operation
    tanh = tanh(view)              1           s1       s2        may overwrite s1 if that dies here
    y = tanh.view(6, 4) @ v        2           s2       s3        an output, alive whatever is planned
    dv = tanh.view(6, 4).t() @ dy  3           s2, s0   s4
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from roundpipe_fx.analysis.cost.model import tensor_bytes
from roundpipe_fx.analysis.in_place import operands_to_write_over
from roundpipe_fx.analysis.operations import Operation, OperationGraph, RecomputeRecipe
from roundpipe_fx.analysis.outside_loss import lasting_bytes, loss_bytes, returned_view_bytes
from roundpipe_fx.analysis.recomputation import (
    Form,
    find_rng_shape_source,
    is_mask_only,
    selection,
    state_bytes,
    updates_statistics_alone,
)
from roundpipe_fx.analysis.snapshots import find_updated_inputs_read
from roundpipe_fx.analysis.storage_ids import OUTSIDE, StorageIds
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    input_nodes,
    is_seeded,
    is_symbolic_scalar,
    is_view,
    tensor_values,
)
from roundpipe_fx.ir.recompute_marks import read_checkpoints, read_region_budget


def read_operations(
    joint: JointGraph, segments: int, granularity: int = 1, in_place: bool = True, sums: bool = False
) -> OperationGraph:
    """Read operations and storages from a graph with segments and stages.

    Args:
        joint: the graph; not changed.
        granularity: bytes that the device's allocator rounds sizes up to.
        in_place: whether stages run eagerly, so that results may overwrite operands that die.
        sums: whether gradients of parameters are added to accumulated gradients, so that they do not outlive the stage.
    """
    expected = joint.expected_tangents
    reader = _OperationReader(joint, expected, granularity, in_place)
    for node in joint.inputs:
        reader.read_input(node)
    tangents, held = (frozenset(s for node in nodes for s in reader.get(node)) for nodes in (joint.tangents, expected))
    forward = [operation for node in joint.in_phase(Phase.FORWARD) if (operation := reader.read(node)) is not None]
    # The backward in the order of the segments, last one first; within a segment as in the graph.
    backward: dict[int, list[Operation]] = {segment: [] for segment in range(segments)}
    for node in sorted(joint.in_phase(Phase.BACKWARD), key=lambda node: -node.meta[Mark.SEGMENT]):
        operation = reader.read(node)
        if operation is not None:
            backward[operation.segment].append(operation)
    for storage in tangents:
        reader.segment_of[storage] = segments
    makers = {storage: operation.index for operation in forward for storage in operation.makes}
    # Storages are numbered in the order in which they are made: forward, then backward.
    outputs, released = _outputs(
        joint, reader, [*forward, *(operation for block in backward.values() for operation in block)]
    )
    values = _values(joint, reader, makers)
    snapshots = _snapshots(joint, reader, [*forward, *(item for block in backward.values() for item in block)])
    states = {operation.index: state_bytes(operation.node) for operation in forward if is_seeded(operation.node)}
    recipes = _Recipes.from_operations(forward, values, reader, states)
    # Outputs are alive in any case.
    must_recompute = {s for s, node in values.items() if Mark.MUST_RECOMPUTE in node.meta and s not in outputs}
    return OperationGraph(
        forward=tuple(forward),
        backward=backward,
        sizes=reader.sizes,
        makers=makers,
        segment_of=reader.segment_of,
        values=values,
        must_save=frozenset(makers.keys() - recipes.whole.keys()),
        must_recompute=frozenset(must_recompute),
        hold_at=_hold_at(forward, backward, must_recompute),
        outputs=frozenset(outputs & makers.keys()),
        released=frozenset(released & makers.keys()),
        tangents=tangents,
        held=held,
        loss=loss_bytes(expected, granularity),
        loss_lasts=lasting_bytes(expected, granularity) + returned_view_bytes(joint, granularity),
        gradients=_gradients(joint, reader, joint.parameters if sums else frozenset()),
        recipes=recipes.whole,
        mask_only=recipes.mask_only,
        rng_shape_sources=_rng_shape_sources(backward, recipes.mask_only, values),
        states=states,
        snapshots=snapshots,
        last_segments=_last_segments(forward, backward, makers),
        stages=_stages(joint, segments),
        regions=_regions(forward),
        segments=segments,
    )


def _values(joint: JointGraph, reader: _OperationReader, makers: Collection[int]) -> dict[int, fx.Node]:
    """By forward storage, the node whose value it is; absent for results of operations that return several."""
    by_storage: dict[int, fx.Node] = {}
    for node in joint.in_phase(Phase.FORWARD):
        if not is_view(node) and isinstance(node.meta.get("val"), torch.Tensor):
            (storage,) = reader.get(node) or (OUTSIDE,)
            if storage in makers:
                by_storage.setdefault(storage, node)
    return by_storage


def _snapshots(
    joint: JointGraph, reader: _OperationReader, operations: Sequence[Operation]
) -> dict[int, tuple[int, ...]]:
    """New storages for copies of updated inputs, by index of the operations that read them in the backward."""
    read = find_updated_inputs_read(joint)
    copy_of: dict[fx.Node, int] = {}
    copies = {}
    for operation in operations:
        if operation.node in read and not updates_statistics_alone(operation.node):
            # One copy of an input, however many operations of the backward read its old value.
            for source in read[operation.node]:
                if source not in copy_of:
                    copy_of[source] = reader.allocate(source)
            copies[operation.index] = tuple(copy_of[source] for source in read[operation.node])
    return copies


def _outputs(
    joint: JointGraph, reader: _OperationReader, operations: Collection[Operation]
) -> tuple[set[int], set[int]]:
    """Storages that the caller gets and holds, and those that it frees when the forward is over: it copies them into
    inputs, and nothing else reads them, or drops them."""
    held, copied, dropped = set[int](), set[int](), set[int]()
    for position, node in enumerate(joint.forward_outputs):
        if isinstance(node, fx.Node):
            results = copied if position in joint.updates else dropped if position in joint.dropped else held
            results.update(reader.get(node))
    # What the caller copies into inputs is held only if something reads it again.
    held |= copied.intersection(storage for operation in operations for storage in operation.reads)
    return held, (copied | dropped) - held


def _gradients(joint: JointGraph, reader: _OperationReader, added: Collection[fx.Node]) -> frozenset[int]:
    """Storages that the backward returns, without gradients of inputs in ``added``: these are added to sums."""
    primals = joint.primals
    return frozenset(
        storage
        for owner, node in zip(joint.gradient_owners, joint.gradients, strict=True)
        if isinstance(node, fx.Node) and owner is not None and primals[owner] not in added
        for storage in reader.get(node)
        if storage != OUTSIDE
    )


@dataclass(frozen=True)
class _Recipes:
    """Finds the operations that recompute forward storages.

    Attributes:
        whole: by storage; absent where it must be saved.
        mask_only: by storage of a dropout's mask, without the dropout's input.
    """

    whole: dict[int, RecomputeRecipe]
    mask_only: dict[int, RecomputeRecipe]

    @classmethod
    def from_operations(
        cls,
        forward: Sequence[Operation],
        values: Mapping[int, fx.Node],
        reader: _OperationReader,
        states: Mapping[int, int],
    ) -> _Recipes:
        """The recipes for the results of forward operations.

        A value that is a selection of another is gathered by its saved indices; results of a hoisted operation are
        saved; every other operation is recomputed as it is. A replay of a random operation also holds the generator's
        current state.
        """
        recipes = cls({}, {})
        for operation in forward:
            # Three ways to make a value again: gather it from a saved selection, run its operation, or draw only a
            # dropout's mask.
            for storage in operation.makes:
                value = values.get(storage)
                picked = selection(value) if value is not None else None
                if value is not None and picked is not None:
                    source, _, indices = picked
                    reads = tuple(s for s in (*reader.get(source), *reader.get(indices)) if s != OUTSIDE)
                    recipes.whole[storage] = _recipe(operation, Form.GATHER, node=value, reads=reads, makes=(storage,))
                elif Mark.MUST_SAVE not in operation.node.meta:
                    workspace = operation.workspace + states.get(operation.index, 0)
                    recipes.whole[storage] = _recipe(operation, Form.SAME, workspace=workspace)
                    if value is not None and is_mask_only(value):
                        workspace += sum(reader.sizes[s] for s in operation.makes if s != storage)
                        recipes.mask_only[storage] = _recipe(
                            operation, Form.MASK, reads=(), makes=(storage,), workspace=workspace
                        )
        return recipes


def _recipe(
    operation: Operation,
    form: Form,
    *,
    node: fx.Node | None = None,
    reads: tuple[int, ...] | None = None,
    makes: tuple[int, ...] | None = None,
    workspace: int = 0,
) -> RecomputeRecipe:
    return RecomputeRecipe(
        operation=operation,
        node=operation.node if node is None else node,
        form=form,
        reads=operation.reads if reads is None else reads,
        makes=operation.makes if makes is None else makes,
        workspace=workspace,
        seconds=operation.seconds,
    )


def _rng_shape_sources(
    backward: Mapping[int, Sequence[Operation]], masks: Collection[int], values: Mapping[int, fx.Node]
) -> dict[tuple[int, int], fx.Node]:
    """By mask and index of the operation that reads it, the gradient whose shape it can be drawn with."""
    sources = {}
    for operation in (operation for block in backward.values() for operation in block):
        for storage in operation.reads:
            source = find_rng_shape_source(values[storage], operation.node) if storage in masks else None
            if source is not None:
                sources[storage, operation.index] = source
    return sources


def _stages(joint: JointGraph, segments: int) -> dict[int, int]:
    """By segment, its stage; a segment without nodes (its values equal earlier ones) has the previous one's."""
    stage_of = {node.meta[Mark.SEGMENT]: node.meta[Mark.STAGE] for node in joint.computed()}
    for segment in range(segments):
        stage_of.setdefault(segment, stage_of.get(segment - 1, 0))
    return stage_of


def _regions(forward: Sequence[Operation]) -> tuple[tuple[frozenset[int], int | float], ...]:
    """Storages of consecutive operations with the same region's budget, and that budget."""
    regions = []
    # Regions are runs of consecutive operations: a module that is called twice is two of them.
    for budget, run in itertools.groupby(forward, key=lambda operation: read_region_budget(operation.node)):
        storages = frozenset(storage for operation in run for storage in operation.makes)
        if budget is not None:
            regions.append((storages, budget))
    return tuple(regions)


def _hold_at(
    forward: Sequence[Operation], backward: Mapping[int, Sequence[Operation]], must_recompute: Collection[int]
) -> dict[int, int]:
    """Segments before whose backward the storages of a checkpoint of several segments are recomputed and held.

    A storage belongs to the innermost checkpoint that contains its maker and all its readers. Only storages that the
    backward reads, or that a nested checkpoint starts from, are worth holding.
    """
    spans: dict[int, tuple[int, int]] = {}
    owner: dict[int, tuple[int, ...]] = {}
    begins: set[int] = set()
    for operation in forward:
        path = read_checkpoints(operation.node)
        for number in path:
            first, last = spans.get(number, (operation.segment, operation.segment))
            # Number of the checkpoint, and the segments that it spans.
            spans[number] = min(first, operation.segment), max(last, operation.segment)
        owner.update((storage, path) for storage in operation.makes if storage in must_recompute)
        for storage in operation.reads:
            # A reader outside of the maker's innermost checkpoint runs after that has been left, so the storage belongs
            # to the outer one that contains both. Makers come before readers, so the owner is known here.
            if storage in owner:
                begins |= {storage} if len(path) > len(owner[storage]) else set()
                # The innermost common checkpoint of maker and readers: the common prefix of their paths.
                both = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(owner[storage], path, strict=False))
                owner[storage] = tuple(number for number, _ in both)
    needed = begins.union(*(operation.reads for block in backward.values() for operation in block))
    held_at = {}
    for storage, path in owner.items():
        first, last = spans[path[-1]] if path else (0, 0)
        if first < last and storage in needed:
            held_at[storage] = last
    return held_at


def _last_segments(
    forward: Sequence[Operation], backward: Mapping[int, Sequence[Operation]], storages: Collection[int]
) -> dict[int, int]:
    last: dict[int, int] = {}
    for operation in (*forward, *(item for block in backward.values() for item in block)):
        for storage in operation.reads:
            if storage in storages:
                last[storage] = max(last.get(storage, 0), operation.segment)
    return last


class _OperationReader:
    """Reads operations from nodes, in order."""

    def __init__(self, joint: JointGraph, expected: Collection[fx.Node], granularity: int, in_place: bool) -> None:
        self._in_place = in_place
        self._numbers = StorageIds(granularity)
        self._tangents = set(joint.tangents)
        self._expected = set(expected)
        self.segment_of: list[int] = []
        self._count = 0

    @property
    def sizes(self) -> list[int]:
        return self._numbers.sizes

    def get(self, node: fx.Node) -> list[int]:
        return self._numbers.get(node)

    def allocate(self, node: fx.Node) -> int:
        """Number a new storage, of the size of an input's value."""
        self.segment_of.append(0)
        return self._numbers.allocate_bytes(tensor_bytes(tensor_values(node)))

    def read_input(self, node: fx.Node) -> None:
        values = tensor_values(node)
        if node in self._tangents:
            expected = node in self._expected
            self._numbers.assign(node, [self._numbers.allocate_tangent(value, expected) for value in values])
            self.segment_of += [0] * len(values)
        else:
            self._numbers.assign(node, [OUTSIDE] * len(values))

    def read(self, node: fx.Node) -> Operation | None:
        """Number the storages of ``node``; returns an operation if the node computes."""
        allocated = self._numbers.follow(node)
        self.segment_of += [node.meta[Mark.SEGMENT]] * len(allocated)
        # Items of tuples, numbers and pure views allocate nothing.
        if node.target is operator.getitem or is_symbolic_scalar(node) or (not allocated and is_view(node)):
            return None
        index = self._count
        self._count += 1
        return Operation(
            index=index,
            node=node,
            segment=node.meta[Mark.SEGMENT],
            stage=node.meta[Mark.STAGE],
            reads=tuple(self._numbers.reads(node)),
            makes=tuple(allocated),
            seconds=node.meta[Mark.SECONDS],
            inplace_candidates=self._inplace_candidates(node) if self._in_place and len(allocated) == 1 else (),
            workspace=node.meta.get(Mark.WORKSPACE, 0),
        )

    def _inplace_candidates(self, node: fx.Node) -> tuple[int, ...]:
        candidates = []
        for operand in operands_to_write_over(node):
            (inplace_candidates,) = self.get(operand)
            others = [storage for source in input_nodes(node) if source is not operand for storage in self.get(source)]
            # An operand that is read through another argument as well must not be written over.
            if inplace_candidates != OUTSIDE and inplace_candidates not in others:
                candidates.append(inplace_candidates)
        return tuple(candidates)
