"""Operators that compute each element from the elements at the same place, with broadcasting."""

from __future__ import annotations

import torch

from roundpipe_fx.analysis.dimensions.labels import CallDims, Labels, Rule
from roundpipe_fx.analysis.dimensions.operands import Call
from roundpipe_fx.ir.joint_graph import has_tag

aten, prims = torch.ops.aten, torch.ops.prims


def is_pointwise(target: torch._ops.OpOverload) -> bool:
    """Return whether PyTorch itself calls an operator pointwise."""
    return target.namespace in ("aten", "prims") and has_tag(target, torch.Tag.pointwise)


def pointwise(call: Call, labels: Labels) -> CallDims:
    """All dimensions of the result; operands are broadcast to it."""
    # Each element of the result is computed from one of each operand, broadcast: every dimension divides.
    dims = labels.of(call.results[0])
    operands = {name: [labels.same(tensor.shape, dims) for tensor in tensors] for name, tensors in call.tensors.items()}
    return operands, [labels.same(shape, dims) for shape in call.results]


UNTAGGED = (
    # copies
    aten._to_copy.default,
    aten.alias.default,
    aten.detach.default,
    aten.copy.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
    aten._conj.default,
    aten._neg_view.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
    prims.device_put.default,
    # values that do not depend on the operand
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    # pointwise, though not tagged
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    aten.masked_fill.Tensor,
    aten.rsub.Tensor,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.remainder.Tensor,
    aten.hardswish.default,
    aten.log_sigmoid_forward.default,
    aten._prelu_kernel.default,
    aten.polar.default,
    aten.complex.default,
    # gradients
    aten.elu_backward.default,
    aten.softplus_backward.default,
    aten.leaky_relu_backward.default,
    aten.hardtanh_backward.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
    aten.log_sigmoid_backward.default,
    aten.mish_backward.default,
    aten._prelu_kernel_backward.default,
)
"""Operators that lack PyTorch's tag."""

RULES: dict[object, Rule] = dict.fromkeys(UNTAGGED, pointwise)
