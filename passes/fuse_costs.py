"""fuse_costs: modelled seconds as a compiler that fuses pointwise operations would take them.

A pointwise operation that is fused with the producer of its operand reads that operand from registers, and one whose
result is read only by other pointwise operations writes nothing to memory; launching is paid once per group. Without
this a planner would save pointwise results that are nearly free to recompute inside the kernel that reads them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from roundpipe_fx.analysis.cost import CostModel, tensor_bytes
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    has_tag,
    input_nodes,
    is_seeded,
    is_view,
    tensor_values,
    viewed,
)


def fuse_costs(joint: JointGraph, costs: CostModel) -> JointGraph:
    """Lower the seconds of pointwise operations to those that they add to the kernels they are fused into."""
    _fuse(joint.computed(), costs)
    return joint


def fuse_costs_of_body(body: fx.Graph, costs: CostModel) -> fx.Graph:
    """The same for the body of a loop over tiles, which is compiled by itself."""
    _fuse([node for node in body.nodes if node.op == "call_function"], costs)
    return body


def _fuse(nodes: Iterable[fx.Node], costs: CostModel) -> None:
    for node in nodes:
        if not _fuses(node):
            continue
        sources = [viewed(source) for source in input_nodes(node)]
        inner = [source for source in sources if _fuses(source)]
        read = sum(tensor_bytes(tensor_values(source)) for source in sources if source not in inner)
        written = 0 if _all_fuse(node) else tensor_bytes(tensor_values(node))
        overhead = costs.overhead if inner else 0.0
        seconds = costs.seconds(0, read + written, tensor_values(node)[0].dtype) - overhead
        node.meta[Mark.SECONDS] = min(node.meta[Mark.SECONDS], max(seconds, 0.0))


def _fuses(node: fx.Node) -> bool:
    pointwise = has_tag(node.target, torch.Tag.pointwise)
    return pointwise and not is_view(node) and not is_seeded(node) and len(tensor_values(node)) == 1


def _all_fuse(node: fx.Node) -> bool:
    return all(_all_fuse(user) if is_view(user) else _fuses(user) for user in node.users)
