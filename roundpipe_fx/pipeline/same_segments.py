"""Equal cuts: cut the graph of a microbatch of another shape at the operations at which the first graph was cut.

Where a graph is narrow depends on its shapes, and the number of segments depends on where it is narrow. So a cut is
remembered by the operation after it: its kind, and how many of that kind come before it. This finds the same operation
in the graph for another shape, even if one of the two has symbolic sizes and computes with them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, is_view
from roundpipe_fx.passes.segments import inside_tuple

OperationKey = tuple[str, int]
"""The kind of an operation, and how many of its kind come before it in the forward."""


def segment_starts(joint: JointGraph) -> tuple[OperationKey | None, ...]:
    """The first operation of each segment but the first; ``None``: it has only views.

    Args:
        joint: a graph with segments.
    """
    firsts: dict[int, OperationKey] = {}
    forward = joint.in_phase(Phase.FORWARD)
    for operation, node, _ in _operations(forward):
        # The first operation of each segment is its name in other graphs: ("aten.mm.default", 7) is the eighth matrix
        # product.
        firsts.setdefault(node.meta[Mark.SEGMENT], operation)
    last = max((node.meta[Mark.SEGMENT] for node in forward), default=0)
    return tuple(firsts.get(segment) for segment in range(1, last + 1))


def find_like_starts(joint: JointGraph, starts: Sequence[OperationKey | None]) -> list[int] | None:
    """Positions in the forward order at which segments begin with the same operations.

    Args:
        joint: a graph without segments.
        starts: returned by :func:`segment_starts` for another graph.

    Returns:
        the positions; ``None`` if this graph does not have all of the operations. If it has them in another order, the
        number of segments is the same, since a schedule requires that.
    """
    forward = joint.in_phase(Phase.FORWARD)
    positions = {operation: position for operation, _, position in _operations(forward)}
    tuples = inside_tuple(forward)
    known = [start for start in starts if start is not None]
    if not all(start in positions for start in known):
        return None
    starts_here = [0]
    # Invariant: `starts_here` ascends, and no segment is empty.
    for boundary in sorted(positions[start] for start in known):
        # Views and computations of sizes belong to what follows, unless nothing else comes before.
        position = boundary
        while position > starts_here[-1] and not _has_own_memory(forward[position - 1]):
            position -= 1
        position = position if position > starts_here[-1] else max(boundary, starts_here[-1] + 1)
        # Results of one operation (the items of a tuple) stay in the segment of the operation.
        while position < len(forward) and tuples[position - 1]:
            position += 1
        if position >= len(forward):
            return None
        starts_here.append(position)
    return starts_here[1:]


def map_boundaries(
    boundaries: Iterable[int], theirs: Sequence[OperationKey | None], ours: Sequence[OperationKey | None]
) -> dict[int, int] | None:
    """Boundaries between the segments of one graph, among the segments of another that does not have the same.

    A boundary lies before the same operation if a segment begins with it there too, else where it lies in proportion.
    Between two boundaries there is at least one segment.

    Args:
        boundaries: numbers of the segments that begin at them.
        theirs: the first operation of each segment but the first; ``None``: not known.
        ours: the same of the other graph.

    Returns:
        the boundaries by theirs, with those at the beginning and at the end; ``None`` if there are too few segments.
    """
    wanted = sorted({*boundaries} - {0})
    segments, last = len(ours) + 1, 0
    if len(wanted) >= segments:
        return None
    positions = {key: position for position, key in enumerate(ours, 1)} | {None: None}
    boundaries_here = {0: 0, len(theirs) + 1: segments}
    # Each boundary goes to the nearest free one: at least one segment after the previous boundary, and enough segments
    # left for those that follow.
    for number, boundary in enumerate(wanted):
        near = positions.get(theirs[boundary - 1])
        if near is None:
            near = round(boundary * segments / (len(theirs) + 1))
        last = boundaries_here[boundary] = min(max(near, last + 1), segments - len(wanted) + number)
    return boundaries_here


def _operations(forward: Sequence[fx.Node]) -> Iterator[tuple[OperationKey, fx.Node, int]]:
    """Operations that allocate, with their positions: views are dropped or added for some shapes."""
    before: Counter[str] = Counter()
    for position, node in enumerate(forward):
        if _has_own_memory(node) and node.target is not operator.getitem:
            name = str(node.target)
            yield (name, before[name]), node, position
            before[name] += 1


def _has_own_memory(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)) and not is_view(node)
