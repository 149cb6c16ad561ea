"""mean_losses: a loss that is a mean becomes a sum and a division, so that the sum can be made in tiles.

The count that a mean of a cross entropy divides by depends on labels alone; it is computed from them, and is known
for the backward before any of the loss is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import CostModel, annotate_added
from roundpipe_fx.ir.graph_edit import insert_call
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, input_nodes, is_tensor

aten = torch.ops.aten
_MEAN, _SUM = 1, 2

_ELEMENTWISE = {
    aten.mse_loss: 2,
    aten.smooth_l1_loss: 2,
    aten.huber_loss: 2,
    aten.soft_margin_loss: 2,
    aten.binary_cross_entropy: 3,
    aten.binary_cross_entropy_with_logits: 4,
}
"""Losses of pairs of elements, with the place of their reduction among the arguments."""
_GRADIENTS = {
    aten.mse_loss_backward: 3,
    aten.smooth_l1_loss_backward: 3,
    aten.huber_loss_backward: 3,
    aten.soft_margin_loss_backward: 3,
    aten.binary_cross_entropy_backward: 4,
}


def split_mean_losses(
    joint: JointGraph,
    costs: CostModel,
    device: torch.device | None = None,
    eager: bool = True,
    present: bool = True,
) -> JointGraph:
    """Rewrite means over a whole tensor as sums that are divided.

    Args:
        joint: an annotated graph; it is rewritten.
        costs: of what is added.
        device: where it runs; ``None``: not known, as are workspaces.
        eager: whether it runs as it is.
        present: whether the device is there.
    """
    for node in list(joint.computed()):
        # Three forms: a cross entropy, a mean, a loss with the reduction "mean". Each becomes a sum and a division.
        packet = getattr(node.target, "overloadpacket", None)
        if packet in (aten.nll_loss_forward, aten.nll_loss2d_forward):
            _split_cross_entropy(node)
        elif node.target is aten.mean.default and not node.kwargs and _has_numbers(node.args[0]):
            _stand_in(node, insert_call(node, aten.sum.default, node.args[0]), _count(node.args[0]))
        elif packet in _ELEMENTWISE and _reduction(node, _ELEMENTWISE[packet]) == _MEAN and _has_numbers(node.args[0]):
            _stand_in(node, _summing(node, _ELEMENTWISE[packet]), _count(node.args[0]))
        elif packet in _GRADIENTS and _reduction(node, _GRADIENTS[packet]) == _MEAN and _has_numbers(node.args[1]):
            gradient = insert_call(node, aten.div.Tensor, node.args[0], _count(node.args[1]))
            summed = _summing(node, _GRADIENTS[packet])
            summed.update_arg(0, gradient)
            node.replace_all_uses_with(summed)
            joint.graph.erase_node(node)
    # New nodes belong to the backward if they read anything of it.
    late, added = set(joint.tangents), []
    for node in joint.computed():
        if Mark.PHASE not in node.meta:
            waits = any(s in late or s.meta.get(Mark.PHASE) is Phase.BACKWARD for s in input_nodes(node))
            node.meta[Mark.PHASE] = Phase.BACKWARD if waits else Phase.FORWARD
            added.append(node)
    annotate_added(added, costs, device, eager, present)
    return joint


def _reduction(node: fx.Node, position: int) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get("reduction", _MEAN)


def _has_numbers(node: Any) -> bool:
    """Return whether a tensor's size is known."""
    if not isinstance(node, fx.Node) or not is_tensor(node):
        return False
    value = node.meta["val"]
    # A sum of many numbers of half precision with few exponents overflows.
    is_wide = value.is_floating_point() and value.dtype is not torch.float16
    return is_wide and all(isinstance(size, int) for size in value.shape) and value.numel() > 0


def _count(node: Any) -> int:
    return int(node.meta["val"].numel())


def _summing(node: fx.Node, position: int) -> fx.Node:
    """The same call with a sum for its reduction."""
    args, kwargs = list(node.args), dict(node.kwargs)
    if len(args) > position:
        args[position] = _SUM
    else:
        kwargs["reduction"] = _SUM
    return insert_call(node, node.target, *args, **kwargs)


def _stand_in(node: fx.Node, total: fx.Node, count: int) -> None:
    node.replace_all_uses_with(insert_call(node, aten.div.Tensor, total, count))
    node.graph.erase_node(node)


def _split_cross_entropy(node: fx.Node) -> None:
    scores, labels, weight, reduction, ignored = node.args
    assert isinstance(scores, fx.Node) and isinstance(labels, fx.Node)
    if reduction != _MEAN or scores.meta["val"].dim() < 2 or any(u.target is not operator.getitem for u in node.users):
        return
    dtype = scores.meta["val"].dtype
    if dtype is torch.float16:
        return
    # What counts: labels that are not ignored, with their classes' weights.
    counts = insert_call(node, aten.ne.Scalar, labels, ignored)
    if isinstance(weight, fx.Node):
        named = insert_call(node, aten.where.ScalarOther, counts, labels, 0)
        flat = insert_call(node, aten.reshape.default, named, [-1])
        weights = insert_call(node, aten.index_select.default, weight, 0, flat)
        counted = insert_call(node, aten.reshape.default, counts, [-1])
        counts = insert_call(node, aten.mul.Tensor, weights, counted)
    total = insert_call(node, aten.sum.dim_IntList, counts, None, dtype=dtype)
    summed = insert_call(node, node.target, scores, labels, weight, _SUM, ignored)
    with node.graph.inserting_before(node):
        loss = node.graph.call_function(operator.getitem, (summed, 0))
    loss.meta = {**summed.meta, "val": summed.meta["val"][0]}
    mean = insert_call(node, aten.div.Tensor, loss, total)
    for item in list(node.users):
        # The second result of the loss was the total weight; it is the sum computed here.
        item.replace_all_uses_with(mean if item.args[1] == 0 else total)
        node.graph.erase_node(item)
    node.graph.erase_node(node)
