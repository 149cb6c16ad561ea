"""Calls of each operator that is described, by sizes that tests vary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._decomp import get_decompositions

from tests.analysis.dimensions.calls import RealCall, call

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class Sizes:
    """Sizes to make shapes of, all different in general."""

    a: int
    b: int
    c: int
    d: int


Sample = Callable[[Sizes], RealCall]


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def inner(*shape: int) -> torch.Tensor:
    """Numbers between 0 and 1."""
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def whole(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(most, shape)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.5


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

PRODUCTS: dict[Any, list[Sample]] = {
    aten.mm.default: [lambda n: call(real(n.a, n.b), real(n.b, n.c))],
    aten.bmm.default: [lambda n: call(real(n.d, n.a, n.b), real(n.d, n.b, n.c))],
    aten.mv.default: [lambda n: call(real(n.a, n.b), real(n.b))],
    aten.dot.default: [lambda n: call(real(n.a), real(n.a))],
    aten.vdot.default: [lambda n: call(real(n.a), real(n.a))],
    aten.outer.default: [lambda n: call(real(n.a), real(n.b))],
    aten.addmm.default: [
        lambda n: call(real(n.c), real(n.a, n.b), real(n.b, n.c)),
        lambda n: call(real(n.a, n.c), real(n.a, n.b), real(n.b, n.c), beta=0.5, alpha=2.0),
        lambda n: call(real(n.a, 1), real(n.a, n.b), real(n.b, n.c)),
    ],
    aten.addbmm.default: [lambda n: call(real(n.c), real(n.d, n.a, n.b), real(n.d, n.b, n.c))],
    aten.baddbmm.default: [
        lambda n: call(real(n.d, n.a, n.c), real(n.d, n.a, n.b), real(n.d, n.b, n.c)),
        lambda n: call(real(1, n.a, 1), real(n.d, n.a, n.b), real(n.d, n.b, n.c)),
    ],
    aten.addmv.default: [lambda n: call(real(n.a), real(n.a, n.b), real(n.b))],
    aten.addr.default: [lambda n: call(real(n.a, n.b), real(n.a), real(n.b))],
    aten.linear.default: [
        lambda n: call(real(n.a, n.d, n.b), real(n.c, n.b)),
        lambda n: call(real(n.a, n.b), real(n.c, n.b), real(n.c)),
    ],
}


def _reshapes() -> list[Sample]:
    return [
        lambda n: call(real(n.a * n.b, n.c), [n.a, n.b, n.c]),
        lambda n: call(real(n.a, n.b, n.c), [n.a * n.b, n.c]),
        lambda n: call(real(n.a, n.b, n.c), [n.a * n.b * n.c]),
        lambda n: call(real(n.a, n.b * n.c), [n.a * n.b, n.c]),
        lambda n: call(real(6 * n.a, 4), [3 * n.a, 8]),
        lambda n: call(real(n.a, 4, 6), [n.a, 6, 4]),
        lambda n: call(real(n.a, 6, 4, n.b), [n.a, 2, 3, 4 * n.b]),
        lambda n: call(real(n.a, 1, n.b), [1, n.a, n.b, 1]),
        lambda n: call(real(n.a, n.b), [-1]),
        lambda n: call(real(1, 1), []),
    ]


VIEWS: dict[Any, list[Sample]] = {
    aten.view.default: _reshapes(),
    aten._unsafe_view.default: _reshapes(),
    aten.reshape.default: _reshapes(),
    aten.flatten.using_ints: [lambda n: call(real(n.a, n.b, n.c), 1, 2), lambda n: call(real(n.a, n.b, n.c))],
    aten.expand.default: [
        lambda n: call(real(n.a, 1), [n.a, n.b]),
        lambda n: call(real(n.a, 1), [n.c, -1, n.b]),
        lambda n: call(real(n.a), [n.b, n.a]),
        lambda n: call(real(), [n.b, n.a]),
    ],
    aten.repeat.default: [
        lambda n: call(real(n.a, n.b), [1, 2]),
        lambda n: call(real(n.a, n.b), [n.c, 1, 3]),
        lambda n: call(real(1, n.b), [n.c, 1]),
    ],
    aten.permute.default: [lambda n: call(real(n.a, n.b, n.c), [2, 0, -2])],
    aten.t.default: [lambda n: call(real(n.a, n.b)), lambda n: call(real(n.a))],
    aten.numpy_T.default: [lambda n: call(real(n.a, n.b, n.c))],
    aten.transpose.int: [lambda n: call(real(n.a, n.b, n.c), 0, -1), lambda n: call(real(n.a, n.b, n.c), 1, 2)],
    aten.squeeze.default: [lambda n: call(real(n.a, 1, n.b))],
    aten.squeeze.dim: [lambda n: call(real(n.a, 1, n.b), 1), lambda n: call(real(n.a, n.b), 0)],
    aten.squeeze.dims: [lambda n: call(real(n.a, 1, n.b), [0, 1]), lambda n: call(real(1, n.a, 1, n.b), [0, -2])],
    aten.unsqueeze.default: [lambda n: call(real(n.a, n.b), 1), lambda n: call(real(n.a, n.b), -1)],
    aten.view_as_real.default: [lambda n: call(torch.complex(real(n.a, n.b), real(n.a, n.b)))],
    aten.view_as_complex.default: [lambda n: call(real(n.a, n.b, 2))],
}

PARTS: dict[Any, list[Sample]] = {
    aten.slice.Tensor: [
        lambda n: call(real(n.a, n.b, n.c), 1, 1, 3),
        lambda n: call(real(n.a, n.b), 0, 0, 9223372036854775807),
        lambda n: call(real(n.a, n.b), -1, 0, n.b),
        lambda n: call(real(n.a, n.b), 0, -n.a, n.a),
        lambda n: call(real(n.a, n.b)),
        lambda n: call(real(n.a, n.b), 1, 0, n.b, 2),
    ],
    aten.slice_backward.default: [
        lambda n: call(real(n.a, n.b), [n.a, n.b + 3], 1, 3, n.b + 3, 1),
        lambda n: call(real(n.a, n.b), [n.a, n.b], 1, 0, 9223372036854775807, 1),
    ],
    aten.slice_scatter.default: [
        lambda n: call(real(n.a, n.b + 2), real(n.a, n.b), 1, 2),
        lambda n: call(real(n.a, n.b), real(n.a, n.b), 1),
    ],
    aten.select.int: [lambda n: call(real(n.a, n.b, n.c), 1, 0), lambda n: call(real(n.a, n.b), -1, -1)],
    aten.select_backward.default: [lambda n: call(real(n.a, n.c), [n.a, n.b, n.c], 1, 0)],
    aten.select_scatter.default: [lambda n: call(real(n.a, n.b, n.c), real(n.a, n.c), 1, 0)],
    aten.narrow.default: [lambda n: call(real(n.a, n.b), 1, 0, 1)],
    aten.split.Tensor: [lambda n: call(real(n.a, n.b, n.c), 2, 1), lambda n: call(real(n.a, n.b), 1, -1)],
    aten.split_with_sizes.default: [lambda n: call(real(n.a, n.b + 3, n.c), [n.b, 1, 2], 1)],
    aten.chunk.default: [lambda n: call(real(n.a, n.b), 2, 1)],
    aten.unbind.int: [lambda n: call(real(n.a, n.b, n.c), 1)],
    aten.cat.default: [
        lambda n: call([real(n.a, n.b), real(n.a, n.c)], 1),
        lambda n: call([real(n.a, n.b), real(n.c, n.b), real(1, n.b)]),
    ],
    aten.stack.default: [lambda n: call([real(n.a, n.b), real(n.a, n.b)], 1), lambda n: call([real(n.a)] * 2, -1)],
    aten.constant_pad_nd.default: [
        lambda n: call(real(n.a, n.b, n.c), [1, 2], 0.5),
        lambda n: call(real(n.a, n.b, n.c), [0, 0, 2, 0]),
        lambda n: call(real(n.a, n.b + 2), [-1, 0]),
    ],
    aten.diagonal.default: [lambda n: call(real(n.a, n.b, n.c), 0, 0, 2)],
}


def _along(**kwargs: Any) -> list[Sample]:
    return [
        lambda n: call(real(n.a, n.b, n.c), 1, **kwargs),
        lambda n: call(real(n.a, n.b), -1, **kwargs),
    ]


def _softmax_backward(log: bool) -> list[Sample]:
    softmax = torch.log_softmax if log else torch.softmax
    return [lambda n: call(real(n.a, n.b), softmax(real(n.a, n.b), 1), 1, torch.float64)]


ALONG: dict[Any, list[Sample]] = {
    aten._softmax.default: [lambda n: call(real(n.a, n.b, n.c), 1, False), lambda n: call(real(n.a, n.b), -1, False)],
    aten._log_softmax.default: [lambda n: call(real(n.a, n.b), 1, False), lambda n: call(real(n.a, n.b), 0, False)],
    aten._safe_softmax.default: _along(),
    aten._softmax_backward_data.default: _softmax_backward(False),
    aten._log_softmax_backward_data.default: _softmax_backward(True),
    aten.cumsum.default: _along(),
    aten.cumprod.default: _along(),
    aten.logcumsumexp.default: _along(),
    aten.cummax.default: _along(),
    aten.cummin.default: _along(),
    aten.sort.default: _along(),
    aten.sort.stable: [lambda n: call(real(n.a, n.b), stable=True, dim=0)],
    aten.argsort.default: _along(),
    aten.flip.default: [lambda n: call(real(n.a, n.b, n.c), [0, -1])],
    aten.roll.default: [lambda n: call(real(n.a, n.b), [1], [1]), lambda n: call(real(n.a, n.b), [1])],
    aten.triu.default: [lambda n: call(real(n.a, n.b, n.c), 1)],
    aten.tril.default: [lambda n: call(real(n.a, n.b, n.c))],
    aten.topk.default: [lambda n: call(real(n.a, n.b), 1), lambda n: call(real(n.a, n.b), 1, 0)],
    aten.glu.default: [lambda n: call(real(n.a, 2 * n.b, n.c), 1)],
    aten.glu_backward.default: [lambda n: call(real(n.a, n.b, n.c), real(n.a, 2 * n.b, n.c), 1)],
}


def _whole() -> list[Sample]:
    return [lambda n: call(real(n.a, n.b)), lambda n: call(real())]


def _one(**kwargs: Any) -> list[Sample]:
    return [
        lambda n: call(real(n.a, n.b, n.c), 1, **kwargs),
        lambda n: call(real(n.a, n.b), -1, True, **kwargs),
        lambda n: call(real(n.a), 0),
    ]


def _several() -> list[Sample]:
    return [
        lambda n: call(real(n.a, n.b, n.c), [0, -1]),
        lambda n: call(real(n.a, n.b, n.c), [1], True),
        lambda n: call(real(n.a, n.b), []),
    ]


def _variance() -> list[Sample]:
    return [lambda n: call(real(n.a, n.b), [1], correction=0), lambda n: call(real(n.a, n.b), [0], keepdim=True)]


REDUCTIONS: dict[Any, list[Sample]] = {
    aten.sum.default: [*_whole(), lambda n: call(mask(n.a, n.b))],
    aten.sum.dim_IntList: [*_several(), lambda n: call(real(n.a, n.b), None), lambda n: call(mask(n.a, n.b), [0])],
    aten.nansum.default: [lambda n: call(real(n.a, n.b), [1]), *_whole()],
    aten.count_nonzero.default: [lambda n: call(whole(2, n.a, n.b))],
    aten.count_nonzero.dim_IntList: [lambda n: call(whole(2, n.a, n.b), [0])],
    aten.mean.default: _whole(),
    aten.mean.dim: _several(),
    aten.amax.default: _several(),
    aten.amin.default: _several(),
    aten.aminmax.default: [lambda n: call(real(n.a, n.b), dim=1), lambda n: call(real(n.a, n.b))],
    aten.max.default: _whole(),
    aten.max.dim: _one(),
    aten.min.default: _whole(),
    aten.min.dim: _one(),
    aten.argmax.default: [*_one(), lambda n: call(real(n.a, n.b))],
    aten.argmin.default: _one(),
    aten.logsumexp.default: _several()[:2],
    aten.any.default: [lambda n: call(mask(n.a, n.b))],
    aten.any.dim: [lambda n: call(mask(n.a, n.b), 1)],
    aten.any.dims: [lambda n: call(mask(n.a, n.b), [1])],
    aten.all.default: [lambda n: call(mask(n.a, n.b))],
    aten.all.dim: [lambda n: call(mask(n.a, n.b), 0, True)],
    aten.all.dims: [lambda n: call(mask(n.a, n.b), [0])],
    aten.prod.default: _whole(),
    aten.prod.dim_int: _one(),
    aten.var.correction: _variance(),
    aten.std.correction: _variance(),
    aten.var_mean.correction: _variance(),
    aten.std_mean.correction: _variance(),
    aten.norm.Scalar: [lambda n: call(real(n.a, n.b))],
    aten.norm.ScalarOpt_dim: [lambda n: call(real(n.a, n.b), 2, [1])],
    aten.linalg_vector_norm.default: [lambda n: call(real(n.a, n.b), 2, [1]), lambda n: call(real(n.a, n.b))],
    aten.median.default: _whole(),
    aten.median.dim: _one(),
    aten.nanmedian.default: _whole(),
    aten.nanmedian.dim: _one(),
    aten.mode.default: _one(),
    aten.kthvalue.default: [lambda n: call(real(n.a, n.b), 1, 1), lambda n: call(real(n.a, n.b), 1, 0, True)],
}

INDEXING: dict[Any, list[Sample]] = {
    aten.embedding.default: [
        lambda n: call(real(7, n.a), whole(7, n.b, n.c)),
        lambda n: call(real(7, n.a), whole(7, n.b), 3),
    ],
    aten.embedding_dense_backward.default: [
        lambda n: call(real(n.b, n.c, n.a), whole(7, n.b, n.c), 7, -1, False),
        lambda n: call(real(n.b, n.a), whole(7, n.b), 7, 3, False),
        lambda n: call(real(n.b, n.a), whole(3, n.b), 3, -1, True),
    ],
    aten.index_select.default: [lambda n: call(real(n.a, n.b, n.c), 1, whole(n.b, n.d))],
    aten.gather.default: [
        lambda n: call(real(n.a, n.b), 1, whole(n.b, n.a, n.c)),
        lambda n: call(real(n.a, n.b), 0, whole(n.a, n.c, n.b)),
        lambda n: call(real(n.a + 1, n.b), 1, whole(n.b, n.a, 1)),
    ],
    aten.scatter.src: [
        lambda n: call(real(n.a, n.b), 1, torch.arange(n.b).expand(n.a, n.b).clone(), real(n.a, n.b)),
        lambda n: call(real(n.a, n.b), 1, whole(n.b, n.a, 1), real(n.a, 1)),
    ],
    aten.scatter.value: [lambda n: call(real(n.a, n.b), 0, whole(n.a, n.c, n.b), 2.5)],
    aten.scatter_add.default: [lambda n: call(real(n.a, n.b), 1, whole(n.b, n.a, n.c), real(n.a, n.c))],
    aten.scatter_reduce.two: [lambda n: call(real(n.a, n.b), 1, whole(n.b, n.a, n.c), real(n.a, n.c), "amax")],
    **{
        operator: [
            lambda n: call(real(n.a, n.b, n.c), [None, whole(n.b, n.d)]),
            lambda n: call(real(n.a, n.b, n.c), [whole(n.a, n.d, 1), whole(n.b, n.c)]),
            lambda n: call(real(n.a, n.b, n.c), [whole(n.a, n.d), None, whole(n.c, n.d)]),
            lambda n: call(real(n.a, n.b, n.c), [None, whole(n.b, n.d, 1), whole(n.c, 1, n.a)]),
        ]
        for operator in (aten.index.Tensor, aten._unsafe_index.Tensor)
    },
    aten.index_put.default: [
        lambda n: call(real(n.a, n.b), [whole(n.a, n.c)], real(n.c, n.b), True),
        lambda n: call(real(n.a, n.b), [None, whole(n.b, n.c)], real()),
        lambda n: call(real(n.a, n.b), [None, whole(n.b, n.c)], real(n.a, 1)),
    ],
    aten._unsafe_index_put.default: [
        lambda n: call(real(n.a, n.b, n.c), [None, whole(n.b, n.d), whole(n.c, n.d)], real(n.a, n.d), True)
    ],
}


def _new(*more: Any) -> list[Sample]:
    return [lambda n: call(real(n.a, n.b), [n.a, n.b], *more), lambda n: call(real(n.a, n.b), [n.c, n.d], *more)]


CREATION: dict[Any, list[Sample]] = {
    aten.full.default: [lambda n: call([n.a, n.b], 1.5), lambda n: call([], 1.5)],
    aten.zeros.default: [lambda n: call([n.a, n.b], dtype=torch.float64)],
    aten.ones.default: [lambda n: call([n.a, n.b])],
    aten.empty.memory_format: [lambda n: call([n.a, n.b])],
    aten.scalar_tensor.default: [lambda n: call(1.5)],
    aten.new_zeros.default: _new(),
    aten.new_ones.default: _new(),
    aten.new_empty.default: _new(),
    aten.new_full.default: _new(2.5),
    aten.arange.default: [lambda n: call(n.a)],
    aten.arange.start: [lambda n: call(1, n.a + 1)],
    aten.arange.start_step: [lambda n: call(0, 2 * n.a, 2)],
    aten.linspace.default: [lambda n: call(0.0, 1.0, n.a)],
    aten.eye.default: [lambda n: call(n.a)],
    aten.eye.m: [lambda n: call(n.a, n.b)],
}


def _layer_norm(n: Sizes) -> tuple[torch.Tensor, ...]:
    x, weight, bias = real(n.a, n.b, n.c), real(n.c), real(n.c)
    return x, weight, bias, *aten.native_layer_norm(x, [n.c], weight, bias, 1e-5)[1:]


def _layer_norm_backward(n: Sizes, asked: list[bool]) -> RealCall:
    x, weight, bias, mean, rstd = _layer_norm(n)
    return call(real(n.a, n.b, n.c), x, [n.c], mean, rstd, weight, bias, asked)


def _rms_norm_backward(n: Sizes, asked: list[bool]) -> RealCall:
    x, weight = real(n.a, n.b, n.c), real(n.c)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return call(real(n.a, n.b, n.c), x, [n.c], rstd, weight, asked)


def _group_norm(n: Sizes) -> tuple[Any, ...]:
    return real(n.a, 2 * n.b, n.c, n.d), real(2 * n.b), real(2 * n.b), n.a, 2 * n.b, n.c * n.d, 2


def _group_norm_backward(n: Sizes, asked: list[bool]) -> RealCall:
    x, weight, bias, *sizes = _group_norm(n)
    _, mean, rstd = aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
    return call(real(*x.shape), x, mean, rstd, weight, *sizes, asked)


def _batch_norm_backward(n: Sizes) -> RealCall:
    x, weight = real(n.a + 1, n.b, n.c, n.d), real(n.b)
    running = real(n.b), inner(n.b)
    _, mean, invstd, *_ = aten._native_batch_norm_legit_functional(x, weight, None, *running, True, 0.1, 1e-5)
    return call(real(*x.shape), x, weight, *running, mean, invstd, True, 1e-5, [True, True, True])


NORMALIZATION: dict[Any, list[Sample]] = {
    aten.native_layer_norm.default: [
        lambda n: call(real(n.a, n.b, n.c), [n.c], real(n.c), real(n.c), 1e-5),
        lambda n: call(real(n.a, n.b, n.c), [n.b, n.c], None, None, 1e-5),
    ],
    aten.native_layer_norm_backward.default: [
        lambda n: _layer_norm_backward(n, [True, True, True]),
        lambda n: _layer_norm_backward(n, [True, False, False]),
    ],
    aten._fused_rms_norm.default: [
        lambda n: call(real(n.a, n.b, n.c), [n.c], real(n.c), 1e-5),
        lambda n: call(real(n.a, n.b, n.c), [n.c], None, None),
    ],
    aten._fused_rms_norm_backward.default: [
        lambda n: _rms_norm_backward(n, [True, True]),
        lambda n: _rms_norm_backward(n, [True, False]),
    ],
    aten.native_group_norm.default: [lambda n: call(*_group_norm(n), 1e-5)],
    aten.native_group_norm_backward.default: [
        lambda n: _group_norm_backward(n, [True, True, True]),
        lambda n: _group_norm_backward(n, [True, False, False]),
    ],
    aten._native_batch_norm_legit_functional.default: [
        lambda n: call(real(n.a + 1, n.b, n.c), real(n.b), real(n.b), real(n.b), inner(n.b), True, 0.1, 1e-5),
    ],
    aten.native_batch_norm_backward.default: [_batch_norm_backward],
}

REDUCTION_NUMBERS = (0, 1, 2)


def _nll(weighted: bool, reduction: int, image: bool = False) -> Sample:
    def sample(n: Sizes) -> RealCall:
        shape = (n.c, n.d) if image else ()
        scores, target = torch.log_softmax(real(n.a, n.b, *shape), 1), whole(n.b, n.a, *shape)
        return call(scores, target, inner(n.b) if weighted else None, reduction, 0)

    return sample


def _nll_backward(weighted: bool, reduction: int, image: bool = False) -> Sample:
    forward = aten.nll_loss2d_forward if image else aten.nll_loss_forward

    def sample(n: Sizes) -> RealCall:
        given = _nll(weighted, reduction, image)(n).args
        loss, total = forward(*given)
        return call(real(*loss.shape), *given, total)

    return sample


def _nlls(make: Callable[..., Sample], image: bool = False) -> list[Sample]:
    return [make(weighted, reduction, image) for weighted in (False, True) for reduction in REDUCTION_NUMBERS]


def _losses(*more: Any, numbers: Callable[..., torch.Tensor] = real) -> list[Sample]:
    def sample(reduction: int) -> Sample:
        return lambda n: call(numbers(n.a, n.b), numbers(n.a, n.b), *more, reduction)

    return [sample(reduction) for reduction in REDUCTION_NUMBERS]


def _losses_backward(
    *more: Any, numbers: Callable[..., torch.Tensor] = real, before: tuple[Any, ...] = ()
) -> list[Sample]:
    def sample(reduction: int) -> Sample:
        def make(n: Sizes) -> RealCall:
            grad = real() if reduction else real(n.a, n.b)
            return call(grad, numbers(n.a, n.b), numbers(n.a, n.b), *before, reduction, *more)

        return make

    return [sample(reduction) for reduction in REDUCTION_NUMBERS]


LOSSES: dict[Any, list[Sample]] = {
    aten.nll_loss_forward.default: [
        *_nlls(_nll),
        lambda n: call(real(n.b), whole(n.b), None, 2, -100),
        lambda n: call(real(n.b), whole(n.b), None, 0, -100),
    ],
    aten.nll_loss2d_forward.default: _nlls(_nll, True),
    aten.nll_loss_backward.default: [
        *_nlls(_nll_backward),
        lambda n: call(real(), real(n.b), whole(n.b), None, 2, -100, torch.ones((), dtype=torch.float64)),
    ],
    aten.nll_loss2d_backward.default: _nlls(_nll_backward, True),
    aten.mse_loss.default: [
        *_losses(),
        lambda n: call(real(n.a, n.b), real(n.b), 2),
        lambda n: call(real(n.b), real(n.a, n.b), 2),
        lambda n: call(real(n.a, 1), real(n.b), 2),
    ],
    aten.smooth_l1_loss.default: _losses(),
    aten.huber_loss.default: _losses(),
    aten.soft_margin_loss.default: _losses(),
    aten.binary_cross_entropy.default: [
        *_losses(None, numbers=inner),
        lambda n: call(inner(n.a, n.b), inner(n.a, n.b), inner(n.b), 2),
    ],
    aten.binary_cross_entropy_with_logits.default: [
        *_losses(None, None),
        lambda n: call(real(n.a, n.b), inner(n.a, n.b), inner(n.a, 1), inner(n.b), 2),
    ],
    aten.mse_loss_backward.default: _losses_backward(),
    aten.smooth_l1_loss_backward.default: _losses_backward(1.0),
    aten.huber_loss_backward.default: _losses_backward(1.0),
    aten.soft_margin_loss_backward.default: _losses_backward(),
    aten.binary_cross_entropy_backward.default: _losses_backward(before=(None,), numbers=inner),
}


def _convolution(
    groups: int, bias: bool, transposed: bool, backward: bool, asked: Sequence[bool] = (True,) * 3
) -> Sample:
    def sample(n: Sizes) -> RealCall:
        inward, outward = groups * n.b, groups * n.c
        x = real(n.a, inward, 6, 7)
        weight = real(*((inward, n.c) if transposed else (outward, n.b)), 3, 2)
        rest = [2, 1], [1, 0], [1, 1], transposed, [0, 0], groups
        offset = real(outward) if bias else None
        if not backward:
            return call(x, weight, offset, *rest)
        y = aten.convolution(x, weight, offset, *rest)
        return call(real(*y.shape), x, weight, [outward] if bias else None, *rest, list(asked))

    return sample


def _convolutions(backward: bool) -> Iterator[Sample]:
    for transposed in (False, True):
        for bias in (False, True):
            for groups in (1, 2):
                yield _convolution(groups, bias, transposed, backward, (True, True, bias))
    if backward:
        yield _convolution(1, False, False, True, (False, True, False))
        yield _convolution(1, True, False, True, (True, False, True))


def _planes(*more: Any) -> list[Sample]:
    return [lambda n: call(real(n.a, n.b, 6, 5), *more), lambda n: call(real(n.a, 6, 5), *more)]


def _pooled_backward(forward: Any, *more: Any, volume: bool = False) -> list[Sample]:
    """Gradients of pooling: the forward's arguments, and what it returned beside the result."""

    def sample(n: Sizes) -> RealCall:
        x = real(n.a, n.b, 4, 6, 5) if volume else real(n.a, n.b, 6, 5)
        y = forward(x, *more)
        if isinstance(y, tuple):
            return call(real(*y[0].shape), x, *more, y[1])
        return call(real(*y.shape), x, *more)

    return [sample]


def _resized_backward(*more: Any) -> list[Sample]:
    return [lambda n: call(real(n.a, n.b, 8, 7), [8, 7], [n.a, n.b, 4, 5], *more)]


MAX_POOL2D = [3, 2], [2, 2], [1, 1], [1, 1], False
AVG_POOL2D = [3, 2], [2, 2], [1, 1], False, True, None
MAX_POOL3D = [2, 3, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False
AVG_POOL3D = [2, 3, 2], [2, 2, 2], [0, 0, 0], False, True, None

CONVOLUTIONS: dict[Any, list[Sample]] = {
    aten.convolution.default: [*_convolutions(False)],
    aten.convolution_backward.default: [*_convolutions(True)],
    aten.max_pool2d_with_indices.default: _planes([2, 2]),
    aten.max_pool2d_with_indices_backward.default: _pooled_backward(aten.max_pool2d_with_indices, *MAX_POOL2D),
    aten.avg_pool2d.default: _planes([2, 2]),
    aten.avg_pool2d_backward.default: _pooled_backward(aten.avg_pool2d, *AVG_POOL2D),
    aten._adaptive_avg_pool2d.default: _planes([2, 3]),
    aten._adaptive_avg_pool2d_backward.default: [lambda n: call(real(n.a, n.b, 2, 3), real(n.a, n.b, 6, 5))],
    aten.upsample_nearest2d.default: _planes([8, 7])[:1],
    aten.upsample_nearest2d_backward.default: _resized_backward(),
    aten._upsample_nearest_exact2d.default: _planes([8, 7])[:1],
    aten._upsample_nearest_exact2d_backward.default: _resized_backward(),
    aten.upsample_bilinear2d.default: _planes([8, 7], False)[:1],
    aten.upsample_bilinear2d_backward.default: _resized_backward(False),
    aten.upsample_bicubic2d.default: _planes([8, 7], False)[:1],
    aten.upsample_bicubic2d_backward.default: _resized_backward(False),
    aten.reflection_pad2d.default: _planes([1, 2, 0, 1]),
    aten.reflection_pad2d_backward.default: [lambda n: call(real(n.a, n.b, 7, 8), real(n.a, n.b, 6, 5), [1, 2, 0, 1])],
    aten.replication_pad2d.default: _planes([1, 2, 0, 1]),
    aten.replication_pad2d_backward.default: [lambda n: call(real(n.a, n.b, 7, 8), real(n.a, n.b, 6, 5), [1, 2, 0, 1])],
    aten.max_pool3d_with_indices.default: [lambda n: call(real(n.a, n.b, 4, 6, 5), [2, 2, 2])],
    aten.max_pool3d_with_indices_backward.default: _pooled_backward(
        aten.max_pool3d_with_indices, *MAX_POOL3D, volume=True
    ),
    aten.avg_pool3d.default: [lambda n: call(real(n.a, n.b, 4, 6, 5), [2, 2, 2])],
    aten.avg_pool3d_backward.default: _pooled_backward(aten.avg_pool3d, *AVG_POOL3D, volume=True),
}


def _attention(causal: bool, masked: bool, keys_of: str = "d") -> Sample:
    def sample(n: Sizes) -> RealCall:
        rows, width = n.c, 8
        keys = rows if causal else n.d
        query, key, value = (real(n.a, n.b, count, width) for count in (rows, keys, keys))
        return call(query, key, value, 0.0, causal, attn_mask=real(n.a, 1, rows, keys) if masked else None)

    return sample


def _attention_backward(causal: bool, masked: bool) -> Sample:
    def sample(n: Sizes) -> RealCall:
        given = _attention(causal, masked)(n)
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(*given.args, **given.kwargs)
        query, key, value, dropout, is_causal = given.args
        return call(real(*out.shape), query, key, value, out, logsumexp, dropout, is_causal, **given.kwargs)

    return sample


ATTENTION: dict[Any, list[Sample]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: [
        _attention(causal, masked) for causal, masked in ((False, False), (True, False), (False, True))
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: [
        _attention_backward(causal, masked) for causal, masked in ((False, False), (True, False), (False, True))
    ],
}

SAMPLES = {
    **COPIES,
    **POINTWISE,
    **PRODUCTS,
    **VIEWS,
    **PARTS,
    **ALONG,
    **REDUCTIONS,
    **INDEXING,
    **CREATION,
    **NORMALIZATION,
    **LOSSES,
    **CONVOLUTIONS,
    **ATTENTION,
}
"""Calls of each operator by sizes."""

NEED_A_DEVICE = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
}
"""Operators without a kernel on the CPU."""

DECOMPOSED = get_decompositions([aten._fused_rms_norm_backward.default])
"""Operators that run as their decompositions, because the CPU has no kernel."""

WITHOUT_VALUES = {aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default}
"""Operators whose results are of any value."""

ROUNDED = {
    aten.elu_backward.default,
    aten.softplus_backward.default,
    aten.mish_backward.default,
    aten.gelu_backward.default,
    aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.default,
}
"""Pointwise operators whose vectorized kernels round otherwise than those for the last elements of a row."""

EXACT = {*COPIES, *POINTWISE, *VIEWS, *PARTS, *CREATION} - ROUNDED
"""Operators whose results on tiles have the bits of the whole."""


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
