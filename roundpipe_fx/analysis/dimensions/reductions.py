"""Reductions: what a sum reduces is summed, as exponentials too; what another reduction reduces is mixed."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch

from roundpipe_fx.analysis.dimensions.labels import CallDims, Labels, Rule
from roundpipe_fx.analysis.dimensions.operands import Call
from roundpipe_fx.operators.log_sum_exp import log_sum_exp

aten = torch.ops.aten


def _reduced(call: Call, rank: int) -> set[int]:
    """The dimensions that a call reduces: those that it names, or all."""
    return call.dims("dim", rank) if call.has("dim") and call["dim"] is not None else set(range(rank))


def _reduce(call: Call, labels: Labels, mixed: bool) -> CallDims:
    shape = call.shape("self")
    if not shape:
        return {"self": [()]}, [() for _ in call.results]
    reduced: AbstractSet[int] = _reduced(call, len(shape))
    # A sum of tiles' sums is the sum; a mean of tiles' means is none unless all have one size, so others are mixed.
    dims = labels.of(shape, mixed=reduced if mixed else ())
    kept = [() if axis in reduced else dim for axis, dim in enumerate(dims)]
    # ``keepdim=False`` removes the dimensions, and ``keepdim=True`` leaves size 1, which has no label.
    if len(kept) != len(call.results[0]):
        kept = [dim for axis, dim in enumerate(dims) if axis not in reduced]
    return {"self": [dims]}, [kept for _ in call.results]


def _sum(call: Call, labels: Labels) -> CallDims:
    return _reduce(call, labels, mixed=False)


def _other(call: Call, labels: Labels) -> CallDims:
    return _reduce(call, labels, mixed=True)


LOGARITHMS = frozenset({aten.logsumexp.default, log_sum_exp})
"""Operators whose results are logarithms of sums: what is summed over tiles is the exponential of the results."""

RULES: dict[object, Rule] = {
    **dict.fromkeys(
        (
            aten.sum.default,
            aten.sum.dim_IntList,
            aten.nansum.default,
            aten.count_nonzero.default,
            aten.count_nonzero.dim_IntList,
            *LOGARITHMS,
        ),
        _sum,
    ),
    **dict.fromkeys(
        (
            aten.mean.default,
            aten.mean.dim,
            aten.amax.default,
            aten.amin.default,
            aten.aminmax.default,
            aten.max.default,
            aten.max.dim,
            aten.min.default,
            aten.min.dim,
            aten.argmax.default,
            aten.argmin.default,
            aten.any.default,
            aten.any.dim,
            aten.any.dims,
            aten.all.default,
            aten.all.dim,
            aten.all.dims,
            aten.prod.default,
            aten.prod.dim_int,
            aten.var.correction,
            aten.std.correction,
            aten.var_mean.correction,
            aten.std_mean.correction,
            aten.norm.Scalar,
            aten.norm.ScalarOpt_dim,
            aten.linalg_vector_norm.default,
            aten.median.default,
            aten.median.dim,
            aten.nanmedian.default,
            aten.nanmedian.dim,
            aten.mode.default,
            aten.kthvalue.default,
        ),
        _other,
    ),
}
