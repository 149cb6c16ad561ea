"""annotate: phase, bytes and modelled seconds of each node.

Bytes are of *new* storage: a view has none, and a storage that several nodes alias is counted at the node that made
it. Sizes that are known only at run time count at their upper bound (:func:`roundpipe_fx.torch_private.size_hint`).
"""

from __future__ import annotations

import torch
from torch import fx

from roundpipe_fx.cost import Roofline, flops_of
from roundpipe_fx.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    input_nodes,
    is_view,
    storages,
    tensor_values,
)
from roundpipe_fx.torch_private import size_hint

__all__ = ["annotate", "annotate_node", "tensor_bytes"]


def annotate(joint: JointGraph, roofline: Roofline) -> JointGraph:
    """Mark every computing node with its phase, bytes, flops and seconds.

    Args:
        joint: the graph; its nodes' ``meta`` is written.
        roofline: the device's cost model.
    """
    _mark_phases(joint)
    for node in joint.computed():
        annotate_node(node, roofline)
    return joint


def annotate_node(node: fx.Node, roofline: Roofline) -> None:
    """Mark one node with bytes, flops and seconds, for passes that add nodes."""
    inherited = {storage for source in input_nodes(node) for storage in storages(source)}
    if is_view(node):
        new_bytes, flops, seconds = 0, 0, 0.0
    else:
        new_bytes = tensor_bytes(tensor_values(node), exclude=inherited)
        flops = flops_of(node)
        read = sum(tensor_bytes(tensor_values(source)) for source in input_nodes(node))
        values = tensor_values(node)
        dtype = values[0].dtype if values else torch.float32
        tuple_item = not values or all(storage in inherited for storage in storages(node))
        seconds = 0.0 if tuple_item else roofline.seconds(flops, read + new_bytes, dtype)
    node.meta[Mark.BYTES] = new_bytes
    node.meta[Mark.FLOPS] = flops
    node.meta[Mark.SECONDS] = seconds


def tensor_bytes(values: list[torch.Tensor], exclude: set[int] | None = None) -> int:
    """Bytes of the storages behind ``values``, each storage once, those in ``exclude`` not at all."""
    seen = set(exclude or ())
    total = 0
    for value in values:
        if value.layout is not torch.strided:
            total += _dense_bytes(value)
            continue
        storage = value.untyped_storage()
        if storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        total += size_hint(storage.nbytes())
    return total


def _dense_bytes(value: torch.Tensor) -> int:
    count = 1
    for size in value.shape:
        count *= size_hint(size)
    return count * value.dtype.itemsize


def _mark_phases(joint: JointGraph) -> None:
    """Backward is what the tracer tagged so, or what depends on a tangent; the rest is the forward's.

    Nodes without a tag (added by other passes) follow their users: what no forward node or output needs is backward.
    """
    depends_on_tangent: set[fx.Node] = set(joint.tangents)
    for node in joint.computed():
        if any(source in depends_on_tangent for source in input_nodes(node)):
            depends_on_tangent.add(node)
    needed_by_forward = {output for output in joint.forward_outputs if isinstance(output, fx.Node)}
    for node in reversed(list(joint.computed())):
        tag = node.meta.get("partitioner_tag")
        if node in depends_on_tangent:
            phase = Phase.BACKWARD
        elif Mark.PHASE in node.meta:
            phase = node.meta[Mark.PHASE]
        elif node in needed_by_forward or tag in ("is_forward", "must_be_in_forward"):
            phase = Phase.FORWARD
        else:
            phase = Phase.BACKWARD
        node.meta[Mark.PHASE] = phase
        if phase is Phase.FORWARD:
            needed_by_forward.update(input_nodes(node))
