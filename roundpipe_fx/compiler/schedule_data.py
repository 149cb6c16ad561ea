"""A rematerialization schedule as lists, numbers and names, and back, for the plan cache."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from roundpipe_fx.analysis.recomputation import Form
from roundpipe_fx.analysis.remat_schedule import BackwardOp, RematBlock, RematSchedule
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, has_side_effect, is_symbolic_scalar, is_view


def schedule_as_data(schedule: RematSchedule) -> Any:
    """A schedule as lists, numbers and names: [blocks, saved], a block [segment, stage, operations], an operation
    [node, form, early, shape source]."""
    blocks = [
        [
            block.segment,
            block.stage,
            [
                [op.node.name, op.form and str(op.form), op.early, op.rng_shape_source and op.rng_shape_source.name]
                for op in block.ops
            ],
        ]
        for block in schedule.blocks
    ]
    return [blocks, sorted(node.name for node in schedule.saved)]


def schedule_from_data(data: Any, joint: JointGraph) -> RematSchedule:
    """The schedule for a graph.

    Args:
        joint: a graph with stages.

    Raises:
        ValueError: it is no schedule of this graph.
        TypeError: it is no schedule.
    """
    nodes = {node.name: node for node in joint.graph.nodes}
    segments, stages = range(len(joint.segments)), {cut.index for cut in joint.cuts}

    def node(name: Any) -> fx.Node:
        if name not in nodes:
            raise ValueError(f"the graph has no node {name!r}")
        return nodes[name]

    def operation(item: Any) -> BackwardOp:
        name, form, early, source = item
        op = BackwardOp(node(name), form and Form(form), early is True, source and node(source))
        phase = op.node.meta.get(Mark.PHASE)
        if phase is not (Phase.BACKWARD if op.form is None else Phase.FORWARD):
            raise ValueError(f"{name} is of the {phase}")
        if op.form is Form.SAME and Mark.MUST_SAVE in op.node.meta:
            raise ValueError(f"{name} must not run twice")
        return op

    blocks, saved = data
    remat_blocks = []
    for segment, stage, items in blocks:
        if segment not in segments or stage not in stages:
            raise ValueError(f"the graph has no segment {segment!r} in a stage {stage!r}")
        remat_blocks.append(RematBlock(segment, stage, tuple(map(operation, items))))
    _check_backward(remat_blocks, joint)
    return RematSchedule(tuple(remat_blocks), frozenset(map(node, saved)))


def _check_backward(blocks: Sequence[RematBlock], joint: JointGraph) -> None:
    """Raise if an operation of the backward does not run exactly once, or runs before one that it reads."""
    run = [op.node for block in blocks for op in block.ops if op.form is None]
    positions = {node: position for position, node in enumerate(run)}
    if len(positions) != len(run):
        raise ValueError("an operation of the backward runs twice")
    for node in joint.in_phase(Phase.BACKWARD):
        implied = node.target is operator.getitem or is_view(node) or is_symbolic_scalar(node) or has_side_effect(node)
        if node not in positions and not implied:
            raise ValueError(f"{node.name} does not run")
    for node, position in positions.items():
        if any(positions.get(source, -1) > position for source in node.all_input_nodes):
            raise ValueError(f"{node.name} runs before an operation that it reads")
