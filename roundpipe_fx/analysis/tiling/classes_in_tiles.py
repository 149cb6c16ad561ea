"""Finds the log-softmaxes that can be computed in tiles of classes, because their readers need only sums over classes.

The forward must read only log-probabilities of labels or their sum over all classes, and the incoming gradient must
consist, for each row, of a value at its label and a value that is the same for all classes. Cross entropies qualify,
also with class weights, ignored labels and label smoothing. With label smoothing, a sum over 6 rows of 50 classes::

    scores[6, 50] ──▶ _log_softmax ─┬─▶ nll_loss_forward        reads the log-probability at each row's label
                                    └─▶ sum over dimension 1    reads their sum over the classes

    nll_loss_backward ──┐                                       a number at each row's label, zeros elsewhere
                        ├─ add ─▶ g ─▶ _log_softmax_backward_data
    expand to [6, 50] ──┘                                       a number for each row, the same for all classes

The gradient of the scores is ``g - softmax(scores)·Σg``, and Σg follows from the two numbers of each row. So neither
the log-probabilities nor g need exist for all classes at once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, is_tensor

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2

_SAME = (aten.detach, aten.alias, aten.clone)
_VIEWS = (aten.view, aten._unsafe_view, aten.reshape, aten.squeeze, aten.unsqueeze)
_PERMUTED = (aten.transpose, aten.permute)
_CROSS_ENTROPIES = (aten.nll_loss_forward, aten.nll_loss2d_forward)
_GRADIENTS = (aten.nll_loss_backward, aten.nll_loss2d_backward)


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Log-probabilities, or a gradient of log-probabilities, times a number.

    Attributes:
        axis: the dimension of its classes; the others are the rows, in their order.
    """

    node: fx.Node
    axis: int
    factor: float

    @property
    def shape(self) -> list[int]:
        """Sizes."""
        return list(self.node.meta["val"].shape)

    def is_column(self, value: Any) -> bool:
        """Return whether a tensor has one entry for each row, in the same dimensions."""
        column = [*self.shape[: self.axis], 1, *self.shape[self.axis + 1 :]]
        return isinstance(value, fx.Node) and is_tensor(value) and list(value.meta["val"].shape) == column


@dataclass(frozen=True, kw_only=True)
class Uses:
    """Readers of log-probabilities.

    Attributes:
        scores: what the log-softmax reads.
        axis: the dimension of their classes.
        reads: the operations that read them in the forward.
        gradients: the gradients of scores, each with the summands of the gradient of the log-probabilities.
    """

    scores: fx.Node
    axis: int
    reads: tuple[Scaled, ...]
    gradients: tuple[tuple[fx.Node, tuple[Scaled, ...]], ...]


def find_online_softmaxes(joint: JointGraph) -> dict[str, int]:
    """Find the log-softmaxes that can be rewritten with sums over their classes.

    Returns:
        by name, in graph order, the dimension of the classes.
    """
    uses = {node.name: find_uses(joint, node) for node in joint.in_phase(Phase.FORWARD)}
    return {name: use.axis for name, use in uses.items() if use is not None}


def find_uses(joint: JointGraph, softmax: fx.Node) -> Uses | None:
    """Find the readers of a log-softmax; ``None``: it is none, or a reader needs all classes of a row together."""
    if softmax.target is not aten._log_softmax.default:
        return None
    shape = softmax.meta["val"].shape
    if len(shape) < 2 or not all(isinstance(size, int) for size in shape) or 0 in shape:
        return None
    scores, dim, _ = softmax.args
    assert isinstance(scores, fx.Node) and isinstance(dim, int)
    axis = dim % len(shape)
    # A log-softmax over one class is zero; in float16 sums over classes would overflow.
    if shape[axis] == 1 or softmax.meta["val"].dtype is torch.float16:
        return None
    returned = {node for node in joint.outputs if isinstance(node, fx.Node)}
    reads: list[Scaled] = []
    gradients: list[tuple[fx.Node, tuple[Scaled, ...]]] = []
    # Follow the log-probabilities through views, transposes and scalings to their readers. All of them have to be sums
    # over classes or picks at a label.
    waiting = [Scaled(node=softmax, axis=axis, factor=1.0)]
    while waiting:
        value = waiting.pop()
        if value.node in returned:
            return None
        for user in value.node.users:
            packet = getattr(user.target, "overloadpacket", None)
            follows = _follow_reader(user, value)
            if follows is not None:
                waiting.append(follows)
            elif packet in _GRADIENTS and user.args[0] is not value.node:
                pass  # only the shape is read
            elif packet is aten._log_softmax_backward_data and user.args[1] is value.node and value.factor == 1:
                # The gradient of the scores: softmax · Σ(gradient) - gradient. The incoming one must split into
                # summands of the two forms.
                parts = _find_summands(Scaled(node=user.args[0], axis=axis, factor=1.0), user)  # type: ignore[arg-type]
                if parts is None:
                    return None
                gradients.append((user, parts))
            elif _is_supported_read(user, value):
                reads.append(Scaled(node=user, axis=value.axis, factor=value.factor))
            else:
                return None
    order = {node: number for number, node in enumerate(softmax.graph.nodes)}
    reads.sort(key=lambda read: order[read.node])
    return Uses(scores=scores, axis=axis, reads=tuple(reads), gradients=tuple(gradients)) if reads else None


def _follow_reader(user: fx.Node, value: Scaled) -> Scaled | None:
    """Follow log-probabilities through a reshape, a permutation or a scaling; ``None`` for any other reader."""
    packet = getattr(user.target, "overloadpacket", None)
    if not user.args or user.args[0] is not value.node or value.node in (*user.args[1:], *user.kwargs.values()):
        return None
    if packet in _SAME:
        return Scaled(node=user, axis=value.axis, factor=value.factor)
    if packet in _VIEWS:
        axis = _class_axis_after_view(user, value)
        return None if axis is None else Scaled(node=user, axis=axis, factor=value.factor)
    if packet in _PERMUTED:
        order = _dimension_order(user)
        if not _keeps_rows(order, value.axis):
            return None
        return Scaled(node=user, axis=order.index(value.axis), factor=value.factor)
    number = _constant_factor(user)
    return None if number is None else Scaled(node=user, axis=value.axis, factor=value.factor * number)


def _class_axis_after_view(view: fx.Node, value: Scaled) -> int | None:
    """The dimension of the classes after a change of shape; ``None``: the classes are not a single dimension there."""
    shape, sizes = list(view.meta["val"].shape), value.shape
    # The classes keep their number and what lies before them: (8, 128, 50257) as (1024, 50257).
    before = math.prod(sizes[: value.axis])
    for axis, size in enumerate(shape):
        if size == sizes[value.axis] and math.prod(shape[:axis]) == before:
            return axis
    return None


def _dimension_order(node: fx.Node) -> list[int]:
    """For each dimension of the result, the corresponding dimension of the operand."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    rank = source.meta["val"].dim()
    if getattr(node.target, "overloadpacket", None) is aten.permute:
        return [int(dim) % rank for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
    first, second = (int(dim) % rank for dim in node.args[1:3])  # type: ignore[arg-type]
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return order


def _keeps_rows(order: Sequence[int], axis: int) -> bool:
    rows = [dim for dim in order if dim != axis]
    return rows == sorted(rows)


def _constant_factor(node: fx.Node) -> float | None:
    """The constant that an operation multiplies its first operand by; ``None``: it does something else."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is aten.neg:
        return -1.0
    if packet in (aten.mul, aten.div) and len(node.args) == 2 and not node.kwargs:
        number = node.args[1]
        if isinstance(number, (int, float)) and number and math.isfinite(number):
            return float(number) if packet is aten.mul else 1 / float(number)
    return None


def _is_supported_read(node: fx.Node, value: Scaled) -> bool:
    """Return whether an operation of the forward reads the log-probability of a label, or sums over classes."""
    packet, shape = getattr(node.target, "overloadpacket", None), value.shape
    if node.meta[Mark.PHASE] is not Phase.FORWARD or not node.args or node.args[0] is not value.node:
        return False
    if packet in _CROSS_ENTROPIES:
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        weights = items[1].users if 1 in items else ()
        # The total weight is read by gradients only.
        only_gradients = all(getattr(user.target, "overloadpacket", None) in _GRADIENTS for user in weights)
        return only_gradients and node.args[3] in (_NONE, _SUM) and value.axis == 1 and len(shape) > 1
    if packet is aten.gather:
        return int(node.args[1]) % len(shape) == value.axis and value.is_column(node.args[2])  # type: ignore[arg-type]
    if packet is aten.sum:
        return value.axis in summed_dims(node, len(shape)) and node.kwargs.get("dtype") is None
    return False


def summed_dims(node: fx.Node, rank: int) -> set[int]:
    """The dimensions that a sum reduces."""
    dims = node.args[1] if len(node.args) > 1 else None
    return {int(dim) % rank for dim in dims} if dims else set(range(rank))  # type: ignore[union-attr, arg-type]


def _find_summands(value: Scaled, reader: fx.Node) -> tuple[Scaled, ...] | None:
    """The summands of a gradient of log-probabilities: each is at the label of a row, or the same for all its classes.

    Returns:
        the operations that compute them; ``None``: a summand is of another form.
    """
    node, packet = value.node, getattr(value.node.target, "overloadpacket", None)
    # The gradient is used once, here: nobody needs it as a whole tensor.
    if set(node.users) != {reader} or node.op != "call_function":
        return None
    if packet in _GRADIENTS:
        return (value,) if value.axis == 1 else None
    if packet is aten.scatter_add:
        into, dim, index, _ = node.args
        fits = int(dim) % len(value.shape) == value.axis and value.is_column(index) and _is_zero(into)  # type: ignore[arg-type]
        return (value,) if fits else None
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if packet is aten.expand:
        shape = list(source.meta["val"].shape)
        # Expanded along the classes: the same for all of them.
        source_axis = value.axis - len(value.shape) + len(shape)
        return (value,) if source_axis < 0 or shape[source_axis] == 1 else None
    if packet is aten.add and len(node.args) == 2 and not node.kwargs:
        # A sum of summands: each has to be of one of the forms.
        operands = [Scaled(node=operand, axis=value.axis, factor=value.factor) for operand in node.all_input_nodes]
        if len(operands) < 2 or any(operand.shape != value.shape for operand in operands):
            return None
        parts_of_operands = [_find_summands(operand, node) for operand in operands]
        return None if None in parts_of_operands else tuple(part for parts in parts_of_operands for part in parts or ())
    axis: int | None = value.axis
    if packet in _VIEWS:
        axis = _class_axis_after_view(source, value)
    elif packet in _PERMUTED:
        order = _dimension_order(node)
        axis = order[value.axis]
        if not _keeps_rows(order, axis):
            return None
    elif packet not in _SAME and _constant_factor(node) is None:
        return None
    factor = value.factor * (_constant_factor(node) or 1.0)
    return None if axis is None else _find_summands(Scaled(node=source, axis=axis, factor=factor), node)


def _is_zero(value: Any) -> bool:
    if not isinstance(value, fx.Node):
        return False
    packet = getattr(value.target, "overloadpacket", None)
    if packet in (aten.full, aten.full_like):
        return isinstance(value.args[1], (int, float)) and value.args[1] == 0
    return packet in (aten.zeros, aten.zeros_like, aten.new_zeros)
