"""Losses: rows are independent without a reduction, summed by a sum, and mixed by a mean."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from roundpipe_fx.analysis.dimensions.labels import CallDims, Dim, Labels, Rule, Unknown
from roundpipe_fx.analysis.dimensions.operands import Call

aten = torch.ops.aten


class Reduction(IntEnum):
    """ATen's numbers of reductions."""

    NONE = 0
    MEAN = 1
    SUM = 2


def _scores(call: Call, labels: Labels) -> tuple[list[Dim], list[Dim]]:
    """Dimensions of log-probabilities, whose classes are mixed, and of the targets."""
    shape = call.shape("self")
    if not shape:
        raise Unknown
    # ``[rows, classes]``, ``[rows, classes, height, width]``, or ``[classes]`` for a single row: the dimension of
    # classes is the second, where there are two.
    classes = 1 if len(shape) > 1 else 0
    # A row's loss picks one class by its target, which may be in any tile of classes.
    dims = labels.of(shape, mixed=[classes])
    rows = [*dims[:classes], *dims[classes + 1 :]]
    return dims, rows if classes else [()] * len(call.shape("target"))


def _nll_loss(call: Call, labels: Labels) -> CallDims:
    """The total weight is summed too; without a reduction it is 0."""
    dims, rows = _scores(call, labels)
    reduction = call["reduction"]
    # A mean divides by the sum of the weights of all targets (or the number that is not ignored), which no tile knows.
    if reduction == Reduction.MEAN:
        labels.mix(rows)
    operands = {"self": [dims], "target": [rows], "weight": [[_classes(dims)]]}
    # A single row without a reduction has no dimension in its loss.
    return operands, [rows if reduction == Reduction.NONE and len(dims) > 1 else [], []]


def _classes(dims: Sequence[Dim]) -> Dim:
    return dims[1] if len(dims) > 1 else dims[0]


def _nll_loss_backward(call: Call, labels: Labels) -> CallDims:
    """A mean divides by the total weight, which is an operand, so rows are independent."""
    dims, rows = _scores(call, labels)
    grad = rows if call["reduction"] == Reduction.NONE and len(dims) > 1 else [()] * len(call.shape("grad_output"))
    operands = {
        "grad_output": [grad],
        "self": [dims],
        "target": [rows],
        "weight": [[_classes(dims)]],
        # The total weight is one number, without a dimension, and each tile reads it whole.
        "total_weight": [[()] * len(call.shape("total_weight"))],
    }
    return operands, [dims]


def _elementwise(call: Call, labels: Labels) -> CallDims:
    """A loss of pairs of elements; everything is broadcast to the larger operand."""
    # Broadcasting: the larger of both has the dimensions of the loss.
    shape = max((call.shape("self"), call.shape("target")), key=len)
    dims = labels.of(call.results[0] if call["reduction"] == Reduction.NONE else shape)
    if call["reduction"] == Reduction.MEAN:
        labels.mix(dims)
    operands = {name: [labels.same(tensor.shape, dims) for tensor in tensors] for name, tensors in call.tensors.items()}
    return operands, [dims if call["reduction"] == Reduction.NONE else []]


def _elementwise_backward(call: Call, labels: Labels) -> CallDims:
    """A mean divides by the number of elements that it is given, so nothing is divided."""
    dims = labels.of(call.results[0])
    # The gradient of a mean has the number of elements in it, and an operator that is given a tile divides by the
    # tile's.
    if call["reduction"] == Reduction.MEAN:
        labels.mix(dims)
    operands = {name: [labels.same(tensor.shape, dims) for tensor in tensors] for name, tensors in call.tensors.items()}
    return operands, [dims]


RULES: dict[object, Rule] = {
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss2d_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
    **dict.fromkeys(
        (
            aten.mse_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.soft_margin_loss.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_with_logits.default,
        ),
        _elementwise,
    ),
    **dict.fromkeys(
        (
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.huber_loss_backward.default,
            aten.soft_margin_loss_backward.default,
            aten.binary_cross_entropy_backward.default,
        ),
        _elementwise_backward,
    ),
}
