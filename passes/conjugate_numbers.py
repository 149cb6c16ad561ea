"""conjugate_numbers: the conjugate of a complex number is a number, not a tensor.

The gradient of a product with a complex number is one with its conjugate, which autograd computes as a tensor that
kernels copy before they use it.
"""

from __future__ import annotations

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph, tensor_values

aten = torch.ops.aten


def fold_conjugate_numbers(joint: JointGraph) -> JointGraph:
    """Replace conjugates of numbers, which products and quotients read, by numbers. Results are bitwise equal."""
    for node in joint.graph.find_nodes(op="call_function", target=aten._conj.default):
        (number,) = node.args
        if not isinstance(number, complex):
            continue
        for user in list(node.users):
            if user.target in (aten.mul.Tensor, aten.div.Tensor) and _has_the_type_of_the_other(user, node):
                user.replace_input_with(node, number.conjugate())
        if not node.users:
            joint.graph.erase_node(node)
    return joint


def _has_the_type_of_the_other(user: fx.Node, number: fx.Node) -> bool:
    """Return whether the type of a result does not depend on that of the number."""
    others = [value for operand in user.args[:2] if operand is not number for value in _tensors(operand)]
    (result,) = tensor_values(user)
    return any(value.dim() and value.dtype == result.dtype for value in others)


def _tensors(value: object) -> list[torch.Tensor]:
    return tensor_values(value) if isinstance(value, fx.Node) else []
