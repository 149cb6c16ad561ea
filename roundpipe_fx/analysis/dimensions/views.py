"""Operators that only rearrange dimensions: views, reshapes, permutations, expansion, repetition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from roundpipe_fx.analysis.dimensions.labels import CallDims, Dim, Labels, Rule, Unknown, is_one, same_size
from roundpipe_fx.analysis.dimensions.operands import Call, counted
from roundpipe_fx.torch_private import size_hint

aten = torch.ops.aten


def _view(call: Call, labels: Labels) -> CallDims:
    """Dimensions of both shapes as products of their common factors; what has none is mixed."""
    # Runs of dimensions with equal products: ``[B * T, V]`` and ``[B, T, V]`` have the runs ``([0], [0, 1])`` and
    # ``([1], [2])``.
    source, result = call.shape("self"), call.results[0]
    dims: tuple[list[Dim], list[Dim]] = ([()] * len(source), [()] * len(result))
    for mine, others in _groups(source, result):
        factors = _factors([source[i] for i in mine], [result[j] for j in others], labels)
        for axes, made, into in zip((mine, others), factors, dims, strict=True):
            for axis, dim in zip(axes, made, strict=True):
                into[axis] = dim
    return {"self": [dims[0]]}, [dims[1]]


def _groups(source: Sequence[Any], result: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dimensions of both shapes with the same number of positions, without dimensions of size 1.

    From where sizes are not known to match up, the last run has all dimensions that are left.
    """
    left = [axis for axis, size in enumerate(source) if not is_one(size)]
    right = [axis for axis, size in enumerate(result) if not is_one(size)]
    # With an empty tensor every product is 0, so products say nothing about which dimensions belong together.
    if any(same_size(size, 0) for size in source):
        return [(left, right)]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        # Both runs grow by turns, the one with the smaller product first, until their products agree: sizes 6, 4 and 3,
        # 8 give 6 > 3, 6 < 24, 24 = 24.
        end, stop = i + 1, j + 1
        while True:
            mine = math.prod(source[axis] for axis in left[i:end])
            others = math.prod(result[axis] for axis in right[j:stop])
            if same_size(mine, others):
                break
            # Hints only decide what is tried; the sizes must be known to be equal.
            if size_hint(mine) <= size_hint(others) and end < len(left):
                end += 1
            elif stop < len(right):
                stop += 1
            else:
                return [*groups, (left[i:], right[j:])]
        groups.append((left[i:end], right[j:stop]))
        i, j = end, stop
    return [*groups, (left[i:], right[j:])] if i < len(left) or j < len(right) else groups


def _factors(source: list[Any], result: list[Any], labels: Labels) -> tuple[list[Dim], list[Dim]]:
    """Dimensions of two runs with the same number of positions."""
    # One dimension on one side: its labels are those of the other side in order, as digits of a number are.
    if len(source) == 1 or len(result) == 1:
        single = len(source) == 1
        parts = labels.of(result if single else source)
        if same_size(math.prod(source), math.prod(result)):
            whole = [tuple(label for dim in parts for label in dim)]
            return (whole, parts) if single else (parts, whole)
    elif all(isinstance(size, int) and size > 0 for size in (*source, *result)):
        # Several on both sides, ``[6, 4] → [3, 8]``: common factors 3, 2, 4 describe both, as ``[3 * 2, 4]`` and ``[3,
        # 2 * 4]``.
        return _common_factors(source, result, labels)
    return list(labels.all_mixed(source)), list(labels.all_mixed(result))


def _common_factors(source: list[int], result: list[int], labels: Labels) -> tuple[list[Dim], list[Dim]]:
    dims: tuple[list[Dim], list[Dim]] = ([()] * len(source), [()] * len(result))
    left, right = [*source], [*result]
    i = j = 0
    while i < len(left) and j < len(right):
        small, large = sorted((left[i], right[j]))
        # No common factor here (``[2, 9] → [3, 6]``): the two sides share no tiles from this dimension on.
        if large % small:
            break
        label = labels.new(small)
        dims[0][i] += label
        dims[1][j] += label
        # What is left of a dimension is described by later labels; a dimension that is used up ends.
        left[i] //= small
        right[j] //= small
        i += left[i] == 1
        j += right[j] == 1
    for rest, made, start in ((left, dims[0], i), (right, dims[1], j)):
        for axis in range(start, len(rest)):
            made[axis] += labels.new(rest[axis], mixed=True)
    return dims


def _expand(call: Call, labels: Labels) -> CallDims:
    dims = labels.of(call.results[0])
    return {"self": [labels.same(call.shape("self"), dims)]}, [dims]


def _repeat(call: Call, labels: Labels) -> CallDims:
    """A dimension of n positions that is repeated r times is the product of r and n; the operand has n only."""
    dims, repeats = labels.of(call.shape("self")), call["repeats"]
    new = len(repeats) - len(dims)
    # Repetitions come first: ``repeat(2)`` of ``[a, b]`` is ``[a, b, a, b]``, where the outer position counts copies.
    result = [(*labels.new(times), *dim) for times, dim in zip(repeats, [()] * new + dims, strict=True)]
    return {"self": [dims]}, [result]


def _permuted(call: Call, labels: Labels, order: Sequence[int]) -> CallDims:
    dims = labels.of(call.shape("self"))
    return {"self": [dims]}, [[dims[axis] for axis in order]]


def _permute(call: Call, labels: Labels) -> CallDims:
    rank = len(call.results[0])
    return _permuted(call, labels, [counted(dim, rank) for dim in call["dims"]])


def _t(call: Call, labels: Labels) -> CallDims:
    return _permuted(call, labels, [*reversed(range(len(call.results[0])))])


def _transpose(call: Call, labels: Labels) -> CallDims:
    order = list(range(rank := len(call.results[0])))
    if order:
        one, other = call.dim("dim0", rank), call.dim("dim1", rank)
        order[one], order[other] = order[other], order[one]
    return _permuted(call, labels, order)


def _squeeze(call: Call, labels: Labels) -> CallDims:
    shape = call.shape("self")
    picked = call.dims("dim", len(shape)) if call.has("dim") else set(range(len(shape)))
    # A tile of one position would be squeezed too, so what may be squeezed is not divided.
    dims = labels.of(shape, mixed=picked)
    kept = [dim for axis, dim in enumerate(dims) if axis not in picked or not is_one(shape[axis])]
    if len(kept) != len(call.results[0]):
        raise Unknown
    return {"self": [dims]}, [kept]


def _unsqueeze(call: Call, labels: Labels) -> CallDims:
    dims = labels.of(call.shape("self"))
    axis = call.dim("dim", len(dims) + 1)
    return {"self": [dims]}, [[*dims[:axis], (), *dims[axis:]]]


def _with_parts(call: Call, labels: Labels) -> CallDims:
    """A complex tensor and its real and imaginary parts, side by side in a last dimension."""
    real, other = (call.shape("self"), call.results[0])
    # The last dimension has the two parts, real and imaginary, and cannot be divided.
    longer = max(real, other, key=len)
    dims = labels.of(longer, mixed=[len(longer) - 1])
    return {"self": [dims[: len(real)]]}, [dims[: len(other)]]


RULES: dict[object, Rule] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.flatten.using_ints: _view,
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.permute.default: _permute,
    aten.t.default: _t,
    aten.numpy_T.default: _t,
    aten.transpose.int: _transpose,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.view_as_real.default: _with_parts,
    aten.view_as_complex.default: _with_parts,
}
