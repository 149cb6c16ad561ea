"""Calls of pointwise operators, by sizes."""

from __future__ import annotations

from typing import Any

import torch

from tests.analysis.dimensions.calls import RealCall, call
from tests.analysis.dimensions.sample_sizes import Sample, Sizes, inner, mask, real, whole

aten, prims = torch.ops.aten, torch.ops.prims


def _both(target: Any, **kwargs: Any) -> list[Sample]:
    return [lambda n: call(real(n.a, n.b), **kwargs), lambda n: call(real(n.a, 1, n.c), **kwargs)]


def _unary(*args: Any, **kwargs: Any) -> list[Sample]:
    return [lambda n: call(real(n.a, n.b), *args, **kwargs), lambda n: call(real(), *args, **kwargs)]


def _gradient(*args: Any, results: int = 1) -> list[Sample]:
    return [lambda n: call(real(n.a, n.b), real(n.a, n.b), *args)]


COPIES: dict[Any, list[Sample]] = {
    aten._to_copy.default: [
        *_unary(dtype=torch.float32),
        *_unary(memory_format=torch.preserve_format),
    ],
    aten.alias.default: _unary(),
    aten.detach.default: _unary(),
    aten.lift_fresh_copy.default: _unary(),
    aten.contiguous.default: _unary(),
    aten.copy.default: [
        lambda n: call(real(n.a, n.b), real(n.a, n.b)),
        lambda n: call(real(n.a, n.b), real(n.b)),
        lambda n: call(whole(5, n.a, n.b), real(n.a, 1)),
    ],
    aten._conj.default: [lambda n: call(torch.complex(real(n.a, n.b), real(n.a, n.b)))],
    aten._neg_view.default: _unary(),
    aten.resolve_conj.default: _unary(),
    aten.resolve_neg.default: _unary(),
    prims.device_put.default: _unary(torch.device("cpu")),
    prims.convert_element_type.default: _unary(torch.float32),
    aten.clone.default: _unary(memory_format=torch.contiguous_format),
    aten.fill.Scalar: _unary(2.5),
    aten.fill.Tensor: [lambda n: call(real(n.a, n.b), real())],
    aten.full_like.default: _unary(2.5),
    aten.zeros_like.default: _unary(),
    aten.ones_like.default: _unary(),
    aten.empty_like.default: _unary(),
}

POINTWISE: dict[Any, list[Sample]] = {
    aten.where.self: [
        lambda n: call(mask(n.a, n.b), real(n.a, n.b), real(n.a, n.b)),
        lambda n: call(mask(n.a, 1), real(n.b), real()),
    ],
    aten.where.ScalarOther: [lambda n: call(mask(n.a, n.b), real(n.b), 1.5)],
    aten.where.ScalarSelf: [lambda n: call(mask(n.a, n.b), 1.5, real(n.a, 1))],
    aten.where.Scalar: [lambda n: call(mask(n.a, n.b), 1.5, 2.5)],
    aten.masked_fill.Scalar: [lambda n: call(real(n.a, n.b), mask(n.b), -1.5)],
    aten.masked_fill.Tensor: [lambda n: call(real(n.a, n.b), mask(n.b), real())],
    aten.rsub.Tensor: [lambda n: call(real(n.a, n.b), real(n.b))],
    aten.floor_divide.default: [lambda n: call(real(n.a, n.b), inner(n.b))],
    aten.floor_divide.Scalar: _unary(0.3),
    aten.remainder.Tensor: [lambda n: call(real(n.a, n.b), inner(n.a, 1))],
    aten.hardswish.default: _unary(),
    aten.log_sigmoid_forward.default: _unary(),
    aten._prelu_kernel.default: [lambda n: call(real(n.a, n.b), real(1, n.b)), lambda n: call(real(n.a, n.b), real(1))],
    aten.polar.default: [lambda n: call(real(n.a, n.b), real(n.a, n.b))],
    aten.complex.default: [lambda n: call(real(n.a, n.b), real(n.b))],
    aten.elu_backward.default: [lambda n: call(real(n.a, n.b), 1.0, 1.0, 1.0, False, real(n.a, n.b))],
    aten.softplus_backward.default: _gradient(1.0, 20.0),
    aten.leaky_relu_backward.default: _gradient(0.1, False),
    aten.hardtanh_backward.default: _gradient(-0.5, 0.5),
    aten.hardswish_backward.default: _gradient(),
    aten.hardsigmoid_backward.default: _gradient(),
    aten.hardshrink_backward.default: _gradient(0.5),
    aten.softshrink_backward.default: _gradient(0.5),
    aten.log_sigmoid_backward.default: [lambda n: call(real(n.a, n.b), real(n.a, n.b), inner(n.a, n.b))],
    aten.mish_backward.default: _gradient(),
    aten._prelu_kernel_backward.default: [lambda n: call(real(n.a, n.b), real(n.a, n.b), real(1, n.b))],
    aten.gelu_backward.default: [*_gradient(), lambda n: call(real(n.a, n.b), real(n.a, n.b), approximate="tanh")],
    aten.native_dropout_backward.default: [lambda n: call(real(n.a, n.b), mask(n.a, n.b), 1.25)],
    aten.clamp.default: _unary(-0.5, 0.5),
    aten.clip.default: _unary(-0.5, None),
    aten.clip.Tensor: [lambda n: call(real(n.a, n.b), real(n.b), None)],
    prims.conj_physical.default: [lambda n: call(torch.complex(real(n.a, n.b), real(n.a, n.b)))],
    aten.clamp.Tensor: [lambda n: call(real(n.a, n.b), real(n.b), None), lambda n: call(real(n.a, n.b), None, real())],
    aten.frexp.Tensor: _unary(),
    aten.div.Tensor_mode: [lambda n: call(real(n.a, n.b), inner(n.b), rounding_mode="floor")],
    aten.div.Scalar_mode: _unary(0.3, rounding_mode="trunc"),
}

ROUNDED = {
    aten.elu_backward.default,
    aten.softplus_backward.default,
    aten.mish_backward.default,
    aten.gelu_backward.default,
    aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.default,
}
"""Pointwise operators whose vectorized kernels round differently from those for the last elements of a row."""


def tagged_sample(target: Any, integers: bool) -> Sample:
    """A call of an operator that PyTorch tags as pointwise, by its schema."""

    def sample(n: Sizes) -> RealCall:
        shapes = [(n.a, n.b), (n.b,), (n.a, 1)]
        args, kwargs = [], {}
        for argument in target._schema.arguments:
            kind = str(argument.type)
            if kind == "Tensor":
                shape = shapes[len(args) % len(shapes)] if _broadcasts(target) else shapes[0]
                value: Any = whole(4, *shape) + 1 if integers else inner(*shape)
            elif argument.has_default_value():
                continue
            elif kind in ("number", "int", "float", "Scalar"):
                value = 2 if integers or kind == "int" else 0.5
            else:
                value = None
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return RealCall(tuple(args), kwargs)

    return sample


def _broadcasts(target: Any) -> bool:
    return target.namespace == "aten" and "backward" not in target.__name__
