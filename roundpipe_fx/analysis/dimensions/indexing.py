"""Operators that read or write by integer indices: the dimension that is indexed is mixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundpipe_fx.analysis.dimensions.labels import CallDims, Dim, Labels, Rule, Unknown, is_one, same_size
from roundpipe_fx.analysis.dimensions.operands import Call

aten = torch.ops.aten


def _embedding(call: Call, labels: Labels) -> CallDims:
    rows, width = call.shape("weight")
    dims = labels.of(call.shape("indices"))
    column = labels.new(width)
    # Which rows are read depends on the indices, so rows are mixed. Columns and positions divide.
    return {"weight": [(labels.new(rows, mixed=True), column)], "indices": [dims]}, [[*dims, column]]


def _embedding_backward(call: Call, labels: Labels) -> CallDims:
    rows, width = call.results[0]
    dims = labels.of(call.shape("indices"))
    column = labels.new(width)
    # Then a row's gradient is divided by how often its index occurs in all of `indices`, which no tile knows.
    if call["scale_grad_by_freq"]:
        labels.mix(dims)
    return {"grad_output": [(*dims, column)], "indices": [dims]}, [(labels.new(rows, mixed=True), column)]


def _index_select(call: Call, labels: Labels) -> CallDims:
    shape, index = call.shape("self"), call.shape("index")
    if not shape or not index:
        raise Unknown
    axis = call.dim("dim", len(shape))
    dims = labels.of(shape, mixed=[axis])
    picked = labels.new(index[0])
    return {"self": [dims], "index": [[picked]]}, [[*dims[:axis], picked, *dims[axis + 1 :]]]


def _kept_and_picked(
    labels: Labels, shape: Sequence[Any], index: Sequence[Any], axis: int
) -> tuple[list[Dim], list[Dim]]:
    """Dimensions of a tensor and of an index of the same rank, which may be shorter; that at ``axis`` is for the
    caller to decide in the index, and mixed in the tensor."""
    if len(shape) != len(index) or not shape:
        raise Unknown
    dims, others = [], []
    for number, (size, part) in enumerate(zip(shape, index, strict=True)):
        both = number != axis and same_size(size, part)
        dims.append(labels.new(size, mixed=not both))
        others.append(dims[-1] if both else labels.new(part, mixed=number != axis))
    return dims, others


def _gather(call: Call, labels: Labels) -> CallDims:
    shape, index = call.shape("self"), call.shape("index")
    dims, picked = _kept_and_picked(labels, shape, index, call.dim("dim", len(shape)))
    return {"self": [dims], "index": [picked]}, [picked]


def _scatter(call: Call, labels: Labels) -> CallDims:
    shape, index = call.shape("self"), call.shape("index")
    axis = call.dim("dim", len(shape))
    dims, picked = _kept_and_picked(labels, shape, index, axis)
    labels.mix([picked[axis]])  # the tensor itself would be added once a tile
    operands = {"self": [dims], "index": [picked]}
    if "src" in call.tensors:
        source = call.shape("src")
        # A smaller `src` uses a part of the index alone, which labels cannot express.
        if not all(same_size(size, part) for size, part in zip(source, index, strict=True)):
            raise Unknown
        operands["src"] = [picked]
    return operands, [dims]


def _index(call: Call, labels: Labels) -> CallDims:
    dims = labels.of(call.shape("self"))
    indexed, broadcast, indices = _indices(call, labels, dims)
    return {"self": [dims], "indices": indices}, [_where_indexed(dims, indexed, broadcast)]


def _index_put(call: Call, labels: Labels) -> CallDims:
    dims = labels.of(call.shape("self"))
    indexed, broadcast, indices = _indices(call, labels, dims)
    # Two positions may name one element: which of them is written last depends on all.
    labels.mix(broadcast)
    values = labels.same(call.shape("values"), _where_indexed(dims, indexed, broadcast))
    return {"self": [dims], "indices": indices, "values": [values]}, [dims]


def _indices(call: Call, labels: Labels, dims: Sequence[Dim]) -> tuple[list[int], list[Dim], list[Sequence[Dim]]]:
    """The places that are indexed, the dimensions of the indices broadcast together, and those of each index.

    Raises:
        Unknown: a mask is an index.
    """
    indices = {axis: index for axis, index in enumerate(call["indices"]) if index is not None}
    # A mask selects as many elements as are true.
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices.values()):
        raise Unknown
    labels.mix([dims[axis] for axis in indices])
    broadcast = labels.of(_broadcast([index.shape for index in indices.values()]))
    return [*indices], broadcast, [labels.same(index.shape, broadcast) for index in indices.values()]


def _broadcast(shapes: Sequence[Sequence[Any]]) -> list[Any]:
    rank = max(map(len, shapes), default=0)
    # Shapes are aligned at the end, as in broadcasting: (3, 1) and (4,) are (3, 1) and (1, 4), together (3, 4).
    aligned = [[1] * (rank - len(shape)) + [*shape] for shape in shapes]
    return [next((size for size in sizes if not is_one(size)), 1) for sizes in zip(*aligned, strict=True)]


def _where_indexed(dims: Sequence[Dim], indexed: Sequence[int], broadcast: Sequence[Dim]) -> list[Dim]:
    """Dimensions of what an index reads: those of the indices stand where the indexed ones were, or in front."""
    # NumPy's rule: indexed dimensions that lie side by side are replaced where they were (``x[:, i, j]``); otherwise
    # what they select comes first (``x[i, :, j]``).
    kept = [dim for axis, dim in enumerate(dims) if axis not in indexed]
    together = bool(indexed) and indexed[-1] - indexed[0] + 1 == len(indexed)
    start = indexed[0] if together else 0
    return [*kept[:start], *broadcast, *kept[start:]]


RULES: dict[object, Rule] = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter_add.default: _scatter,
    aten.scatter_reduce.two: _scatter,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
}
