"""Proportionality: which values are proportional to one scalar, so that they can be made before it is known.

The gradients of a loss head are proportional to the loss's incoming gradient. So they can be made in the forward, as if
that were one, and multiplied by it in the backward (as Liger's fused loss does).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import input_nodes, tensor_values

aten = torch.ops.aten

_IN_FIRST = frozenset(
    {
        aten.nll_loss_backward,
        aten.nll_loss2d_backward,
        aten._log_softmax_backward_data,
        aten._softmax_backward_data,
        aten.tanh_backward,
        aten.sigmoid_backward,
        aten.gelu_backward,
        aten.silu_backward,
        aten.elu_backward,
        aten.leaky_relu_backward,
        aten.hardtanh_backward,
        aten.threshold_backward,
        aten.native_layer_norm_backward,
        aten._fused_rms_norm_backward,
        aten.native_dropout_backward,
        aten.embedding_dense_backward,
        aten.slice_backward,
        aten.select_backward,
        aten.binary_cross_entropy_backward,
        aten.soft_margin_loss_backward,
        aten.mse_loss_backward,
        aten.smooth_l1_loss_backward,
        aten.huber_loss_backward,
        aten.neg,
        aten.sum,
        aten.mean,
        aten.view,
        aten._unsafe_view,
        aten.reshape,
        aten.expand,
        aten.permute,
        aten.t,
        aten.transpose,
        aten.squeeze,
        aten.unsqueeze,
        aten.slice,
        aten.select,
        aten.alias,
        aten.clone,
        aten.detach,
        aten._to_copy,
        aten.div,
        aten.masked_fill,
        aten.gather,
        aten.cumsum,
    }
)
"""Proportional in their first operand, whatever the others are."""
_PRODUCTS = frozenset({aten.mul, aten.mm, aten.bmm, aten.mv, aten.dot})
_SUMS = frozenset({aten.add, aten.sub, aten.cat, aten.stack})
_CHOICES = frozenset({aten.where})
_SCATTERS = frozenset({aten.scatter, aten.scatter_add})


def find_proportional(nodes: Iterable[fx.Node], to: Collection[fx.Node]) -> frozenset[fx.Node] | None:
    """Find the values among those of ``nodes`` that are proportional to others: multiplied by what all of these are.

    Args:
        to: what they may depend on.

    Returns:
        those that are; the others do not depend on it. ``None`` if one depends on it in another way, or nobody knows.
    """
    # In topological order each node's kind follows from those of its operands: f is proportional to g if f(c·g) =
    # c·f(g).
    linear: dict[fx.Node, bool] = dict.fromkeys(to, True)
    for node in nodes:
        if node in linear:
            continue
        kind = _kind(node, linear)
        if kind is None:
            return None
        linear[node] = kind
    return frozenset(node for node, kind in linear.items() if kind)


def _kind(node: fx.Node, proportional: Mapping[fx.Node, bool]) -> bool | None:
    """Return whether a value is proportional; ``None``: neither that nor free of the scalar."""

    def is_proportional(value: Any) -> bool:
        return isinstance(value, fx.Node) and proportional.get(value, False)

    count = sum(is_proportional(source) for source in input_nodes(node))
    if not count:
        return False
    # An item of a tuple: its tuple was found proportional, as all items of it are.
    if node.target is operator.getitem:
        return True
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _IN_FIRST:
        # Proportional in the first operand alone: ``nll_loss_backward(g, …)`` is g times what the others give. Rounded
        # division is not.
        fits = count == 1 and is_proportional(node.args[0]) and node.kwargs.get("rounding_mode") is None
        fits = fits and all(value.is_floating_point() or value.is_complex() for value in tensor_values(node))
        # Filled with zero only: ``c·0 = 0``, and any other number would not grow with the gradient.
        if packet is aten.masked_fill:
            fits = fits and isinstance(node.args[2], (int, float)) and node.args[2] == 0
        return True if fits else None
    if packet in _PRODUCTS:
        # ``g·a`` is proportional, ``g·g`` is quadratic.
        return True if sum(is_proportional(operand) for operand in node.args[:2]) == 1 else None
    if packet in _SUMS:
        operands = node.args[0] if packet in (aten.cat, aten.stack) else node.args[:2]
        # ``g + h`` is proportional if both are; ``g + 1`` is not.
        return True if all(is_proportional(operand) for operand in operands) else None  # type: ignore[union-attr]
    if packet in _CHOICES:
        # The condition may be anything that does not depend on g; both branches must be proportional, or zero.
        return True if all(is_proportional(operand) or _is_zero(operand) for operand in node.args[1:]) else None
    if packet in _SCATTERS:
        written = node.args[3] if not node.kwargs else None
        fits = all(is_proportional(operand) or _is_zero(operand) for operand in (node.args[0], written))
        return True if fits and not is_proportional(node.args[2]) else None
    return None


def _is_zero(value: Any) -> bool:
    """Return whether a value is known to be zero."""
    if isinstance(value, fx.Node):
        packet = getattr(value.target, "overloadpacket", None)
        fill = value.args[1] if packet in (aten.full, aten.full_like) else value.args[0] if value.args else None
        zeros = packet in (aten.zeros, aten.zeros_like, aten.new_zeros)
        filled = packet in (aten.full, aten.full_like, aten.scalar_tensor)
        return zeros or (filled and isinstance(fill, (int, float)) and fill == 0)
    return isinstance(value, (int, float)) and value == 0
