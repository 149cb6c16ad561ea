"""fuse_costs: modelled seconds as a compiler that fuses pointwise operations would take them.

A pointwise operation that is fused with the producer of its operand reads that operand from registers, and one whose
result is read only by other pointwise operations writes nothing to memory; launching is paid once per group. Without
this a planner would save pointwise results that are nearly free to recompute inside the kernel that reads them.

On a GPU casts and reductions are in these kernels too, as in :mod:`roundpipe_fx.analysis.fusion`: a norm reads its
operand once and writes its result once::

    x ══▶ [float, square, mean, rsqrt, product, cast] ══▶ result      ══ memory

On the CPU pointwise operations alone are counted so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx

from roundpipe_fx.analysis.cost import CostModel, tensor_bytes
from roundpipe_fx.analysis.fusion import is_fusible, is_in_kernel
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
    in_kernel, repeats = (is_in_kernel, is_fusible) if costs.launch else (_fuses, _fuses)
    for node in nodes:
        if not in_kernel(node) or not tensor_values(node):
            continue
        sources = [viewed(source) for source in input_nodes(node)]
        inner = [source for source in sources if repeats(source)]
        read = sum(tensor_bytes(tensor_values(source)) for source in sources if source not in inner)
        if costs.launch and node.target in _SOFTMAXES and tensor_values(node)[0].shape[-1] > _ROW_IN_KERNEL:
            read += sum(
                tensor_bytes(tensor_values(behind)) for source in sources for behind in _behind(source, repeats)
            )
        written = 0 if repeats(node) and _all_fuse(node, in_kernel) else tensor_bytes(tensor_values(node))
        overhead = costs.overhead if inner else 0.0
        seconds = costs.seconds(0, read + written, tensor_values(node)[0].dtype) - overhead
        node.meta[Mark.SECONDS] = min(node.meta[Mark.SECONDS], max(seconds, 0.0))


_SOFTMAXES = frozenset({torch.ops.aten._log_softmax.default, torch.ops.aten._softmax.default})
_ROW_IN_KERNEL = 1 << 14
"""Elements of a row that a kernel need not read again, once it knows the row's sum: it has them, or the cache has."""


def _behind(source: fx.Node, repeats: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The values in memory that a kernel reads for an operand."""
    return [viewed(operand) for operand in input_nodes(source)] if repeats(source) else [source]


def _fuses(node: fx.Node) -> bool:
    pointwise = has_tag(node.target, torch.Tag.pointwise)
    return pointwise and not is_view(node) and not is_seeded(node) and len(tensor_values(node)) == 1


def _all_fuse(node: fx.Node, in_kernel: Callable[[fx.Node], bool]) -> bool:
    return all(_all_fuse(user, in_kernel) if is_view(user) else in_kernel(user) for user in node.users)
