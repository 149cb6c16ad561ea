"""statistics: softmaxes and norms in compiled stages are written with the narrow values that they are computed from.

As one operation, a log-softmax that the backward reads is handed over whole. With the maximum and the logarithm of the
sum of each row, which are handed over instead, it is repeated inside the kernel that reads it (``fused_recompute``)::

    y = _log_softmax(x)    →    y = (x - max) - log(sum(exp(x - max)))

The operations are Inductor's own for these operators, so its kernels compute the same numbers. On a GPU they take
together what the one operation takes: kernels repeat the cheap ones.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from roundpipe_fx.analysis.cost import CostModel, annotate_node
from roundpipe_fx.ir.graph_edit import insert_decomposed
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, input_nodes, is_view, tensor_values
from roundpipe_fx.torch_private import inductor_decomposition

aten = torch.ops.aten

_WRITTEN = frozenset(
    {
        aten._log_softmax.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._softmax.default,
        aten.native_group_norm.default,
        aten.native_layer_norm.default,
    }
)


def decompose_into_statistics(joint: JointGraph, costs: CostModel) -> JointGraph:
    """Decompose softmaxes and norms of the forward whose results the backward reads.

    Args:
        joint: a graph with recomputation written into it; it is rewritten. Operations on symbolic sizes stay.
        costs: cost model for the nodes that are added.

    Returns:
        The same graph.
    """
    for node in joint.in_phase(Phase.FORWARD):
        if node.target in _WRITTEN and Mark.MUST_SAVE not in node.meta and _is_static(node) and _read_later(node):
            _write(node, costs)
    return joint


def _is_static(node: fx.Node) -> bool:
    values = [value for source in (node, *input_nodes(node)) for value in tensor_values(source)]
    return all(isinstance(size, int) for value in values for size in (*value.shape, *value.stride()))


def _read_later(node: fx.Node) -> bool:
    for user in node.users:
        if user.op == "output":
            continue
        if user.meta[Mark.PHASE] is not Phase.FORWARD:
            return True
        if (user.target is operator.getitem or is_view(user)) and _read_later(user):
            return True
    return False


def _write(node: fx.Node, costs: CostModel) -> None:
    written = insert_decomposed(node, inductor_decomposition(node))
    for step in written:
        step.meta.update({mark: node.meta[mark] for mark in _MARKS if mark in node.meta})
        annotate_node(step, costs)
    if costs.launch:
        for step in written:
            step.meta[Mark.SECONDS] = node.meta[Mark.SECONDS] if step is written[-1] else 0.0


_MARKS = (Mark.PHASE, Mark.SEGMENT, Mark.STAGE, Mark.MUST_RECOMPUTE)
