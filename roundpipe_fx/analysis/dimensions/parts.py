"""Operators that take parts of a tensor along a dimension, or put parts together: that dimension is mixed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from roundpipe_fx.analysis.dimensions.labels import CallDims, Dim, Labels, Rule, Unknown, same_size
from roundpipe_fx.analysis.dimensions.operands import Call

aten = torch.ops.aten


def replaced(labels: Labels, dims: Sequence[Dim], shape: Sequence[Any], axes: Collection[int]) -> list[Dim]:
    """Dimensions of another tensor that differ from given ones at some places, where they are mixed.

    Args:
        shape: of the other tensor.
        axes: where they differ; there the given ones are mixed too.

    Raises:
        Unknown: a size at another place is not known to be equal.
    """
    if len(shape) != len(dims):
        raise Unknown
    # Positions of an operand and of its part do not match, so along `axes` neither is divided: a tile of ``x[3:]`` is
    # none of ``x``.
    labels.mix([dims[axis] for axis in axes])
    return [
        labels.new(size, mixed=True) if axis in axes else labels.same([size], [dim])[0]
        for axis, (size, dim) in enumerate(zip(shape, dims, strict=True))
    ]


def _slice(call: Call, labels: Labels) -> CallDims:
    shape, result = call.shape("self"), call.results[0]
    dims, axis = labels.of(shape), call.dim("dim", len(shape))
    # ``x[:, :]`` is written by tracing for a slice of everything, and divides like the operand.
    if _is_whole(call, shape[axis], result[axis]):
        return {"self": [dims]}, [dims]
    return {"self": [dims]}, [replaced(labels, dims, result, [axis])]


def _is_whole(call: Call, whole: Any, part: Any) -> bool:
    return bool(same_size(whole, part) and same_size(call["step"], 1))


def _slice_backward(call: Call, labels: Labels) -> CallDims:
    shape, result = call.shape("grad_output"), call.results[0]
    dims, axis = labels.of(shape), call.dim("dim", len(shape))
    if _is_whole(call, result[axis], shape[axis]):
        return {"grad_output": [dims]}, [dims]
    return {"grad_output": [dims]}, [replaced(labels, dims, result, [axis])]


def _slice_scatter(call: Call, labels: Labels) -> CallDims:
    shape, part = call.shape("self"), call.shape("src")
    dims, axis = labels.of(shape), call.dim("dim", len(shape))
    if _is_whole(call, shape[axis], part[axis]):
        return {"self": [dims], "src": [dims]}, [dims]
    return {"self": [dims], "src": [replaced(labels, dims, part, [axis])]}, [dims]


def _without(dims: Sequence[Dim], axis: int) -> list[Dim]:
    return [*dims[:axis], *dims[axis + 1 :]]


def _select(call: Call, labels: Labels) -> CallDims:
    shape = call.shape("self")
    axis = call.dim("dim", len(shape))
    dims = labels.of(shape, mixed=[axis])
    return {"self": [dims]}, [_without(dims, axis)]


def _select_backward(call: Call, labels: Labels) -> CallDims:
    result = call.results[0]
    axis = call.dim("dim", len(result))
    dims = labels.of(result, mixed=[axis])
    return {"grad_output": [_without(dims, axis)]}, [dims]


def _select_scatter(call: Call, labels: Labels) -> CallDims:
    shape = call.shape("self")
    axis = call.dim("dim", len(shape))
    dims = labels.of(shape, mixed=[axis])
    return {"self": [dims], "src": [_without(dims, axis)]}, [dims]


def _split(call: Call, labels: Labels) -> CallDims:
    shape = call.shape("self")
    axis = call.dim("dim", len(shape))
    dims = labels.of(shape, mixed=[axis])
    # Pieces have labels of their own along the axis, and share those of all others.
    return {"self": [dims]}, [replaced(labels, dims, result, [axis]) for result in call.results]


def _unbind(call: Call, labels: Labels) -> CallDims:
    shape = call.shape("self")
    axis = call.dim("dim", len(shape))
    dims = labels.of(shape, mixed=[axis])
    return {"self": [dims]}, [_without(dims, axis) for _ in call.results]


def _cat(call: Call, labels: Labels) -> CallDims:
    result = call.results[0]
    axis = call.dim("dim", len(result))
    dims = labels.of(result, mixed=[axis])
    operands = [replaced(labels, dims, tensor.shape, [axis]) for tensor in call.tensors["tensors"]]
    return {"tensors": operands}, [dims]


def _stack(call: Call, labels: Labels) -> CallDims:
    result = call.results[0]
    axis = call.dim("dim", len(result))
    dims = labels.of(result, mixed=[axis])
    return {"tensors": [_without(dims, axis) for _ in call.tensors["tensors"]]}, [dims]


def _pad(call: Call, labels: Labels) -> CallDims:
    shape, pad = call.shape("self"), call["pad"]
    dims = labels.of(shape)
    # `pad` counts from the last dimension: ``(1, 1, 0, 0)`` pads the last one and leaves the one before.
    pairs = zip(pad[::2], pad[1::2], strict=True)
    padded = {len(shape) - 1 - i for i, pair in enumerate(pairs) if not all(same_size(size, 0) for size in pair)}
    return {"self": [dims]}, [replaced(labels, dims, call.results[0], padded)]


def _diagonal(call: Call, labels: Labels) -> CallDims:
    shape = call.shape("self")
    picked = {call.dim("dim1", len(shape)), call.dim("dim2", len(shape))}
    dims = labels.of(shape, mixed=picked)
    kept = [dim for axis, dim in enumerate(dims) if axis not in picked]
    return {"self": [dims]}, [[*kept, labels.new(call.results[0][-1], mixed=True)]]


RULES: dict[object, Rule] = {
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.slice_scatter.default: _slice_scatter,
    aten.select.int: _select,
    aten.select_backward.default: _select_backward,
    aten.select_scatter.default: _select_scatter,
    aten.narrow.default: _split,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _split,
    aten.unbind.int: _unbind,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.constant_pad_nd.default: _pad,
    aten.diagonal.default: _diagonal,
}
