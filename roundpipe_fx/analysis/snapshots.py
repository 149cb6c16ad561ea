"""Snapshots: copies of inputs that the caller updates in place after the forward, for the backward to read.

A buffer that the forward updates has its new value when the backward runs. What is recomputed there reads a copy of the
old one, which is made at the beginning of the forward and lives until it is read for the last time. A plan that
recomputes nothing may need none.
"""

from __future__ import annotations

import torch
from torch import fx

from roundpipe_fx.analysis.cost import CostModel, annotate_node
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, input_nodes, is_view

aten = torch.ops.aten


def find_updated_inputs_read(joint: JointGraph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """By node, the inputs that the caller updates after the forward and that the node reads, also through views."""
    behind: dict[fx.Node, tuple[fx.Node, ...]] = {
        node: (node,) for node in joint.inputs if node in joint.mutated_inputs
    }
    readers: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in joint.computed() if behind else ():
        read = tuple(dict.fromkeys(source for operand in input_nodes(node) for source in behind.get(operand, ())))
        if read:
            readers[node] = read
            if is_view(node):
                behind[node] = read
    return readers


class Snapshots:
    """Copies of inputs that the caller updates in place after the forward, made at the beginning of the forward."""

    def __init__(self, joint: JointGraph, costs: CostModel) -> None:
        self._joint = joint
        self._costs = costs
        self._copies: dict[fx.Node, fx.Node] = {}

    def get_copy(self, source: fx.Node) -> fx.Node:
        """Get the copy of ``source``, which is inserted at the first call."""
        if source not in self._copies:
            stage = min(user.meta[Mark.STAGE] for user in source.users if Mark.STAGE in user.meta)
            with self._joint.graph.inserting_before(next(self._joint.computed())):
                copy = self._joint.graph.create_node(
                    "call_function", aten.clone.default, (source,), name=f"{source.name}_before_update"
                )
            value = source.meta["val"]
            with value.fake_mode:
                copy.meta["val"] = torch.empty_like(value)
            copy.meta.update({Mark.PHASE: Phase.FORWARD, Mark.STAGE: stage, Mark.SEGMENT: 0})
            annotate_node(copy, self._costs)
            self._copies[source] = copy
        return self._copies[source]
