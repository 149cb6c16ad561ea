"""Operators that work along one or several dimensions, and keep all: softmax, cumulative sums, sorting, flipping."""

from __future__ import annotations

from collections.abc import Callable

import torch

from roundpipe_fx.analysis.dimensions.labels import CallDims, Labels, Rule, Unknown
from roundpipe_fx.analysis.dimensions.operands import Call

aten = torch.ops.aten

DimsOfCall = Callable[[Call, int], set[int]]
"""Returns the dimensions along which a call works, given the rank of its tensors."""


def _along(worked: DimsOfCall) -> Rule:
    """All operands and results have one shape, in which some dimensions are mixed."""

    def rule(call: Call, labels: Labels) -> CallDims:
        result = call.results[0]
        # The operator works along some dimensions (a softmax along the last); rows along the others are independent.
        dims = labels.of(result, mixed=worked(call, len(result)))
        operands = {
            name: [labels.same(tensor.shape, dims) for tensor in tensors] for name, tensors in call.tensors.items()
        }
        return operands, [labels.same(shape, dims) for shape in call.results]

    return rule


def _dim(call: Call, rank: int) -> set[int]:
    return {call.dim("dim", rank)}


def _dims(call: Call, rank: int) -> set[int]:
    return call.dims("dims", rank)


def _last_two(call: Call, rank: int) -> set[int]:
    return {rank - 1, rank - 2}


def _topk(call: Call, labels: Labels) -> CallDims:
    shape, result = call.shape("self"), call.results[0]
    if not shape:
        raise Unknown
    axis = call.dim("dim", len(shape))
    dims = labels.of(shape, mixed=[axis])
    # The selected positions have a label of their own: `k` of them, in the order of the values.
    picked = [*dims[:axis], labels.new(result[axis], mixed=True), *dims[axis + 1 :]]
    return {"self": [dims]}, [picked, picked]


def _glu(call: Call, labels: Labels) -> CallDims:
    shape = call.shape("self")
    dims = labels.of(shape, mixed=[axis := call.dim("dim", len(shape))])
    # Half of the input gates the other half, so positions i and i + n/2 belong together.
    half = labels.new(call.results[0][axis], mixed=True)
    return {"self": [dims]}, [[*dims[:axis], half, *dims[axis + 1 :]]]


def _glu_backward(call: Call, labels: Labels) -> CallDims:
    shape = call.shape("self")
    dims = labels.of(shape, mixed=[axis := call.dim("dim", len(shape))])
    half = labels.new(call.shape("grad_output")[axis], mixed=True)
    return {"grad_output": [[*dims[:axis], half, *dims[axis + 1 :]]], "self": [dims]}, [dims]


RULES: dict[object, Rule] = {
    **dict.fromkeys(
        (
            aten._softmax.default,
            aten._softmax_backward_data.default,
            aten._safe_softmax.default,
            aten._log_softmax.default,
            aten._log_softmax_backward_data.default,
            aten.cumsum.default,
            aten.cumprod.default,
            aten.logcumsumexp.default,
            aten.cummax.default,
            aten.cummin.default,
            aten.sort.default,
            aten.sort.stable,
            aten.argsort.default,
        ),
        _along(_dim),
    ),
    aten.flip.default: _along(_dims),
    aten.roll.default: _along(_dims),
    aten.triu.default: _along(_last_two),
    aten.tril.default: _along(_last_two),
    aten.topk.default: _topk,
    aten.glu.default: _glu,
    aten.glu_backward.default: _glu_backward,
}
