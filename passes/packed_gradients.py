"""packed_gradients: a recurrent module's gradients on packed sequences are added in autograd's order.

Each step of each sequence adds to the gradients of the weights. If a module is called twice, or its weights are also
used elsewhere, autograd adds all of these terms one by one, not the sum over one call's steps. The operator of such a
call is one node of the graph; this pass makes it begin with the sum of the terms before it.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from roundpipe_fx.ir.graph_edit import substitute_node
from roundpipe_fx.ir.joint_graph import JointGraph

aten = torch.ops.aten


def pass_sums_to_backward(joint: JointGraph) -> JointGraph:
    """Pass the sums that gradients are added to into the backward of recurrent operators.

    Args:
        joint: a captured graph; it is rewritten.
    """
    order = {node: number for number, node in enumerate(joint.graph.nodes)}
    for call in joint.graph.find_nodes(op="call_function", target=torch.ops.roundpipe_fx.recur_backward.default):
        *inputs, needs, _ = call.args
        sums: list[fx.Node | None] = [None] * sum(needs)
        for result in list(call.users):
            addition = _only_addition(result)
            if addition is None or order[addition.all_input_nodes[0]] > order[call]:
                continue
            sums[result.args[1]] = addition.all_input_nodes[0]
            substitute_node(addition, result)
            joint.graph.erase_node(addition)
        if any(sums):
            call.args = (*inputs, needs, sums)
    return joint


def _only_addition(result: fx.Node) -> fx.Node | None:
    """The sum that a gradient is added to, after others, if nothing else reads it."""
    (reader, *others) = result.users or (None,)
    if result.target is not operator.getitem or reader is None or others or reader.target != aten.add.Tensor:
        return None
    total, added = reader.args[:2]
    alike = isinstance(total, fx.Node) and total.meta["val"].dtype == result.meta["val"].dtype
    return reader if alike and added is result and total is not result and not reader.kwargs else None
