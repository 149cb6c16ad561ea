"""Marks of a graph that has been annotated and cut, as plain data for the plan cache.

From ``annotate`` to ``stages`` most passes only write marks on nodes. On a graph where none of them has moved, added or
removed a node, their whole result is the marks, the segments and the stages, and need not be computed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from roundpipe_fx.ir.joint_graph import MARK_USES, JointGraph, Mark, Phase
from roundpipe_fx.ir.segment import Segment, StageCut

FIRST_MARKING_PASS = "annotate"
_PLAIN = {
    Mark.PHASE: (str,),
    Mark.BYTES: (int,),
    Mark.WORKSPACE: (int,),
    Mark.UNTRIED: (bool,),
    Mark.SECONDS: (int, float),
    Mark.FLOPS: (int,),
    Mark.MUST_SAVE: (str,),
    Mark.MUST_RECOMPUTE: (str,),
    Mark.SEGMENT: (int,),
    Mark.STAGE: (int,),
}
"""Types of the values of marks that these passes write."""


def marks_as_data(
    joint: JointGraph,
    before: Sequence[str],
    passes: Collection[str],
    segments: Sequence[Segment],
    cuts: Sequence[StageCut],
) -> Any:
    """The marks of a graph, by mark in the order of the computing nodes, with its segments and stages.

    Args:
        before: names of its computing nodes before these passes ran.
        passes: names of these passes. Marks of others are not stored: those passes run with a cached plan too.

    Returns:
        ``None`` if the passes did more than mark nodes, or marked them with other than plain values.
    """
    nodes = list(joint.computed())
    # Names in order are the check: no node was added, removed or moved.
    if [node.name for node in nodes] != list(before) or joint.parts:
        return None
    columns: dict[str, list[Any]] = {}
    for key, use in MARK_USES.items():
        if use.written_by.isdisjoint(passes):
            continue
        values = [node.meta.get(key) for node in nodes]
        if any(value is not None for value in values):
            if key not in _PLAIN:
                return None
            columns[key] = [str(value) if key == Mark.PHASE else value for value in values]
    # The plan may be of the same segments in other stages.
    stage_of = {segment: c.index for c in cuts for segment in range(c.first, c.last + 1)}
    columns[Mark.STAGE] = [stage_of[segment] for segment in columns[Mark.SEGMENT]]
    return [
        columns,
        [[*dataclasses.astuple(segment)] for segment in segments],
        [[*dataclasses.astuple(c)] for c in cuts],
    ]


def mark_as_cached(joint: JointGraph, data: Any) -> JointGraph:
    """Mark and cut a graph as an equal one was.

    Args:
        joint: a graph before the first of these passes; its nodes' ``meta`` is written.

    Raises:
        ValueError: the data belong to another graph.
        TypeError: the data have another form.
    """
    nodes = list(joint.computed())
    columns, segments, cuts = data
    # The data come from a file, so every value's type and every length is checked before a node is marked.
    for key, values in columns.items():
        types = _PLAIN.get(key, ())
        if len(values) != len(nodes) or not all(value is None or type(value) in types for value in values):
            raise ValueError(f"{key} is not marked on {len(nodes)} nodes")
    phases = [Phase(phase) for phase in columns[Mark.PHASE]]
    cut_in = [Segment(*segment) for segment in segments]
    stages = [StageCut(*cut) for cut in cuts]
    if any(position not in range(len(cut_in)) for position in columns[Mark.SEGMENT]):
        raise ValueError(f"there are {len(cut_in)} segments")
    for key, values in {**columns, Mark.PHASE: phases}.items():
        for node, value in zip(nodes, values, strict=True):
            if value is not None:
                node.meta[key] = value
    return dataclasses.replace(joint, segments=tuple(cut_in), cuts=tuple(stages))


def remove_marks(joint: JointGraph) -> None:
    """Remove the marks."""
    for node in joint.computed():
        for key in _PLAIN:
            node.meta.pop(key, None)
