"""Operators that make tensors from sizes."""

from __future__ import annotations

import torch

from roundpipe_fx.analysis.dimensions.labels import CallDims, Labels, Rule, same_size
from roundpipe_fx.analysis.dimensions.operands import Call

aten = torch.ops.aten


def _filled(call: Call, labels: Labels) -> CallDims:
    return {}, [labels.of(call.results[0])]


def _like(call: Call, labels: Labels) -> CallDims:
    """Of the operand no more than the kind is read; where it has the result's sizes, it can be divided with it."""
    shape, result = call.shape("self"), call.results[0]
    dims = labels.of(result)
    # With another rank there is no way to say which dimension of the operand is which of the result.
    if len(shape) != len(result):
        return {"self": [labels.all_mixed(shape)]}, [dims]
    pairs = zip(shape, result, dims, strict=True)
    # The operand gives only dtype and device: its dimensions have labels of the result where sizes agree, so that tiles
    # of both match.
    return {"self": [[dim if same_size(size, other) else labels.new(size, True) for size, other, dim in pairs]]}, [dims]


def _counting(call: Call, labels: Labels) -> CallDims:
    # Values count positions from the first, so a tile would start again at 0.
    return {}, [labels.all_mixed(call.results[0])]


RULES: dict[object, Rule] = {
    **dict.fromkeys(
        (
            aten.full.default,
            aten.zeros.default,
            aten.ones.default,
            aten.empty.memory_format,
            aten.scalar_tensor.default,
        ),
        _filled,
    ),
    **dict.fromkeys(
        (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default),
        _like,
    ),
    **dict.fromkeys(
        (
            aten.arange.default,
            aten.arange.start,
            aten.arange.start_step,
            aten.linspace.default,
            aten.eye.default,
            aten.eye.m,
        ),
        _counting,
    ),
}
