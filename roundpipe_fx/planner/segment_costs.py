"""Costs of a graph's segments (seconds, saved bytes, parameters, gradients), read off before any stage exists.

The costs of any run of segments as a stage follow from them without emitting it. So many ways to divide a model among
devices can be compared (:mod:`roundpipe_fx.planner.step_bound`). ::

    segment         0     1     2     3     4
    seconds         1.0   0.8   0.8   0.8   2.0
    stage of 1-3    └───── 2.4 ──────┘           seconds add up; bytes do too, but for values that cross its borders
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from roundpipe_fx.analysis.cost import tensor_bytes
from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.compiler.operations_in_tiles import read_graph_operations
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, tensor_values
from roundpipe_fx.passes.entry import PassLevel
from roundpipe_fx.remat.least_bytes import bytes_of_operation
from roundpipe_fx.schedules.partition import partition, run_costs


@dataclass(frozen=True, kw_only=True)
class SegmentCosts:
    """Costs of a graph's segments, for one microbatch. What is given by segment is in the order of the forward.

    Attributes:
        forward_seconds: modelled seconds of each segment's forward.
        backward_seconds: those of its backward.
        late_seconds: those of them that wait for incoming gradients; the others may run before these arrive.
        entry_seconds: seconds of sending what enters a segment to another device, and its gradient back.
        entry_bytes: bytes that enter a segment.
        forward_reads: for each segment, the segments before it whose results its forward reads.
        backward_reads: for each segment, those after it whose backward its own backward waits for.
        saved: for each segment, bytes of each value that its forward computes and a backward reads, and the seconds
            that recomputing it takes at the least; infinite where it must be saved.
        forward_peak: for each segment, the most bytes that an operation of its forward reads and makes.
        backward_peak: the same of its backward.
        parameters: for each segment, numbers of the parameters and buffers that it reads.
        gradients: for each segment, bytes of the gradients that it adds to, by number of the parameter.
        tensors: the parameters and buffers, by number.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    late_seconds: tuple[float, ...]
    entry_seconds: tuple[float, ...]
    entry_bytes: tuple[int, ...]
    forward_reads: tuple[frozenset[int], ...]
    backward_reads: tuple[frozenset[int], ...]
    saved: tuple[tuple[tuple[int, float], ...], ...]
    forward_peak: tuple[int, ...]
    backward_peak: tuple[int, ...]
    parameters: tuple[frozenset[int], ...]
    gradients: tuple[Mapping[int, int], ...]
    tensors: Mapping[int, torch.Tensor]

    @property
    def count(self) -> int:
        """Number of segments."""
        return len(self.forward_seconds)

    def starts(self, stages: int) -> list[int]:
        """The first segment of each of so many stages: those into which the graph is cut for as many."""
        seconds = [sum(both) for both in zip(self.forward_seconds, self.backward_seconds, strict=True)]
        return partition(run_costs(seconds, self.entry_seconds), [*self.entry_bytes], stages)


def segment_costs(joint: JointGraph, setting: Setting) -> SegmentCosts:
    """Cut a graph into segments, and read off what they take.

    Args:
        joint: a prepared graph of one microbatch; it is rewritten.
        setting: what lowering knows besides the graph.
    """
    for level in (PassLevel.ANNOTATED, PassLevel.SEGMENTED, PassLevel.STAGED):
        joint = setting.run(joint, level)
    segments = joint.segments
    graph = read_graph_operations(joint, setting, sums=True)
    forward_reads, backward_reads, saved = _read_operations(graph, len(segments))
    forward_peak, backward_peak = [0] * len(segments), [0] * len(segments)
    # The least that a stage needs while it runs: whatever is saved, each operation has its operands and results.
    for operation in graph.forward:
        inside = operation.segment
        forward_peak[inside] = max(forward_peak[inside], bytes_of_operation(graph, operation))
    for inside, operations in graph.backward.items():
        backward_peak[inside] = max((bytes_of_operation(graph, operation) for operation in operations), default=0)
    numbers = {node: number for number, node in enumerate(joint.primals) if node in joint.parameters}
    read: list[set[int]] = [set() for _ in segments]
    for node in joint.computed():
        read[node.meta[Mark.SEGMENT]].update(numbers[source] for source in node.all_input_nodes if source in numbers)
    gradients: list[Counter[int]] = [Counter() for _ in segments]
    parameters = set(numbers.values())
    # A gradient counts in the segment that computes it, and several segments may add to one parameter (tied weights).
    for owner, gradient in zip(joint.gradient_owners, joint.gradients, strict=True):
        if isinstance(gradient, fx.Node) and owner in parameters and Mark.SEGMENT in gradient.meta:
            assert owner is not None
            gradients[gradient.meta[Mark.SEGMENT]][owner] = tensor_bytes(tensor_values(gradient))
    transfer_seconds = setting.costs.transfer_seconds
    return SegmentCosts(
        forward_seconds=tuple(segment.forward_seconds for segment in segments),
        backward_seconds=tuple(segment.backward_seconds for segment in segments),
        late_seconds=_gradient_dependent_seconds(graph, len(segments)),
        entry_seconds=tuple(2 * transfer_seconds(segment.entry_bytes) for segment in segments),
        entry_bytes=tuple(segment.entry_bytes for segment in segments),
        forward_reads=forward_reads,
        backward_reads=backward_reads,
        saved=saved,
        forward_peak=tuple(forward_peak),
        backward_peak=tuple(backward_peak),
        parameters=tuple(map(frozenset, read)),
        gradients=tuple(gradients),
        tensors={number: node.meta["val"] for node, number in numbers.items()},
    )


def _gradient_dependent_seconds(graph: OperationGraph, count: int) -> tuple[float, ...]:
    """By segment, seconds of the backward's operations that depend on incoming gradients."""
    late, seconds = set(graph.tangents), [0.0] * count
    # The backward runs from the last segment to the first, so what an operation reads was looked at before it.
    for segment in sorted(graph.backward, reverse=True):
        for operation in graph.backward[segment]:
            # Late: it reads an incoming gradient, or what was computed from one.
            if not late.isdisjoint(operation.reads):
                late.update(operation.makes)
                seconds[segment] += operation.seconds
    return tuple(seconds)


_Reads = tuple[frozenset[int], ...]
_SavedBySegment = tuple[tuple[tuple[int, float], ...], ...]


def _read_operations(graph: OperationGraph, count: int) -> tuple[_Reads, _Reads, _SavedBySegment]:
    """Who reads whom, and what the backward reads of the forward."""
    forward: list[set[int]] = [set() for _ in range(count)]
    backward: list[set[int]] = [set() for _ in range(count)]
    # A segment depends on those that make what its forward reads; tangents come from outside.
    for operation in graph.forward:
        forward[operation.segment].update(
            graph.segment_of[storage]
            for storage in operation.reads
            if graph.is_forward(storage) and storage not in graph.tangents
        )
    kept: set[int] = set()
    # Values of the forward that a backward reads are what may be saved; values of the backward make one segment wait
    # for another.
    for segment, operations in graph.backward.items():
        storages = [storage for operation in operations for storage in operation.reads]
        kept.update(storage for storage in storages if graph.is_forward(storage))
        backward[segment].update(
            graph.segment_of[storage]
            for storage in storages
            if not graph.is_forward(storage) and graph.segment_of[storage] < count
        )
    saved: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    together = Counter(graph.makers[storage] for storage in kept)  # one operation recomputes all that it makes
    for storage in sorted(kept):
        # Infinite: it must be saved, since there is no recipe, or the value is held in any case.
        seconds = math.inf
        if storage in graph.recipes and storage not in graph.must_save and storage not in graph.outputs:
            recipes = [graph.recipes[storage], *([graph.mask_only[storage]] if storage in graph.mask_only else [])]
            # One operation that makes several of these values is recomputed once for all: each has its share of the
            # seconds.
            seconds = min(recipe.seconds for recipe in recipes) / together[graph.makers[storage]]
        saved[graph.segment_of[storage]].append((graph.sizes[storage], seconds))
    return (
        tuple(frozenset(reads - {position}) for position, reads in enumerate(forward)),
        tuple(frozenset(reads - {position}) for position, reads in enumerate(backward)),
        tuple(map(tuple, saved)),
    )
