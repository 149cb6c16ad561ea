"""dropout: on the CPU, replaced by drawing its mask and two products.

There ``native_dropout`` and its gradient consist of these operations, each with a new result. As operations of the
graph the products can overwrite operands that die, and the mask is a separate value that depends only on the generator
and a shape: it can be redrawn without the dropout's input, and the dropout's result can be recomputed from a saved mask
without drawing. The values are bitwise equal. Other devices have one kernel for it.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from roundpipe_fx.ir.graph_edit import insert_call, replace_by
from roundpipe_fx.ir.joint_graph import JointGraph, tensor_values

aten = torch.ops.aten


def expand_dropout(joint: JointGraph) -> JointGraph:
    """Rewrite dropouts on the CPU and their gradients. Runs before annotate.

    Dropouts of tensors with symbolic sizes, or with permuted dimensions in memory, stay as they are.
    """
    for node in list(joint.computed()):
        if any(value.device.type != "cpu" for value in tensor_values(node)):
            continue
        if node.target is aten.native_dropout.default and _is_plain(node):
            _expand(node)
        elif node.target is aten.native_dropout_backward.default:
            gradient, mask, scale = node.args
            masked = insert_call(node, aten.mul.Tensor, gradient, mask)  # in the kernel's order, with its strides
            replace_by(node, insert_call(node, aten.mul.Tensor, masked, scale, value=node.meta["val"]))
    return joint


def _is_plain(node: fx.Node) -> bool:
    source, probability, train = node.args
    assert isinstance(source, fx.Node)
    value = source.meta["val"]
    return (
        isinstance(probability, float)
        and 0 < probability < 1
        and train is not False
        and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
        and value.is_contiguous()
        and all(user.target is operator.getitem for user in node.users)
    )


def _expand(node: fx.Node) -> None:
    source, probability, _ = node.args
    assert isinstance(source, fx.Node) and isinstance(probability, float)
    value = source.meta["val"]
    dropped, drawn = node.meta["val"]
    # ``bernoulli`` reads only the shape and the dtype of its operand.
    shape = insert_call(node, aten.full.default, [], False, dtype=torch.bool, device=value.device)
    expanded = insert_call(node, aten.expand.default, shape, list(value.shape))
    mask = insert_call(node, aten.bernoulli.p, expanded, 1 - probability, value=drawn)
    # The kernel multiplies by a factor of the operand's type.
    factor = float(torch.tensor(1 / (1 - probability), dtype=value.dtype))
    masked = insert_call(node, aten.mul.Tensor, source, mask)
    result = insert_call(node, aten.mul.Tensor, masked, factor, value=dropped)
    for item in list(node.users):
        replace_by(item, mask if item.args[1] == 1 else result)
    node.graph.erase_node(node)
