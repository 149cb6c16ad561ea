"""annotate: phase, bytes and modelled seconds of each node.

Bytes are of *new* storage: a view has none, and a storage that several nodes alias is counted at the node that
allocates it. Sizes that are known only at run time count at their upper bound
(:func:`roundpipe_fx.torch_private.size_hint`).
"""

from __future__ import annotations

from torch import fx

from roundpipe_fx.analysis.cost import CostModel, annotate_node
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, input_nodes


def annotate(joint: JointGraph, costs: CostModel) -> JointGraph:
    """Mark every computing node with its phase, bytes, flops and seconds.

    Args:
        joint: the graph; its nodes' ``meta`` is written.
        costs: the device's cost model.
    """
    _mark_phases(joint)
    for node in joint.computed():
        annotate_node(node, costs)
    return joint


def _mark_phases(joint: JointGraph) -> None:
    """Nodes that the tracer tagged as backward, or that depend on a tangent, are backward; the others are forward.

    Nodes without a tag (added by other passes) follow their users: those that no forward node or output needs are
    backward.
    """
    depends_on_tangent = joint.find_tangent_dependents()
    needed_by_forward = {output for output in joint.forward_outputs if isinstance(output, fx.Node)}
    for node in reversed(list(joint.computed())):
        tag = node.meta.get("partitioner_tag")
        if not joint.gradients:
            phase = Phase.FORWARD  # nothing is differentiated
        elif node in depends_on_tangent:
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
