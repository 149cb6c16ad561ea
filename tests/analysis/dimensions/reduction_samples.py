"""Calls of matrix products, reductions and operators along dimensions, by sizes."""

from __future__ import annotations

from typing import Any

import torch

from roundpipe_fx.operators.log_sum_exp import log_sum_exp
from tests.analysis.dimensions.calls import call
from tests.analysis.dimensions.sample_sizes import Sample, mask, real, whole

aten, prims = torch.ops.aten, torch.ops.prims

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
    log_sum_exp: [lambda n: call(real(n.a, n.b, n.c), [0, -1]), lambda n: call(real(n.a, n.b, n.c), [1])],
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
