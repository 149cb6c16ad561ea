"""Normalizations: what is normalized is mixed; rows are summed in the gradients of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from roundpipe_fx.analysis.dimensions.labels import CallDims, Dim, Labels, Rule, Unknown
from roundpipe_fx.analysis.dimensions.operands import Call

aten = torch.ops.aten


def _rows(call: Call, labels: Labels) -> dict[str, Sequence[Dim]]:
    """Dimensions of a layer norm's tensors by what they are like: the input, statistics, and weights."""
    shape = call.shape("input")
    rows = len(shape) - len(call["normalized_shape"])
    # A row's mean and variance are over all of its normalized dimensions, so these are mixed.
    dims = labels.of(shape, mixed=range(rows, len(shape)))
    # Statistics keep the rank of the input, with size 1 along normalized dimensions: ``[8, 128, 512]`` has ``[8, 128,
    # 1]``.
    return {"input": dims, "statistics": [*dims[:rows], *[()] * (len(shape) - rows)], "weight": dims[rows:]}


KINDS = {
    "input": "input",
    "grad_out": "input",
    "grad_output": "input",
    "weight": "weight",
    "bias": "weight",
    "mean": "statistics",
    "rstd": "statistics",
    "running_mean": "weight",
    "running_var": "weight",
    "save_mean": "weight",
    "save_invstd": "weight",
    "save_var": "weight",
}
"""What the operands of normalizations are like."""


def _form(call: Call, kinds: Mapping[str, Sequence[Dim]], results: Sequence[str]) -> CallDims:
    operands = {name: [kinds[KINDS[name]]] for name in call.tensors}
    return operands, [kinds[kind] for kind in results]


def _asked(call: Call, kinds: Sequence[str]) -> list[str]:
    """The gradients that an output mask asks for."""
    return [kind for kind, asked in zip(kinds, call["output_mask"], strict=True) if asked]


def _layer_norm(call: Call, labels: Labels) -> CallDims:
    return _form(call, _rows(call, labels), ["input", "statistics", "statistics"])


def _layer_norm_backward(call: Call, labels: Labels) -> CallDims:
    return _form(call, _rows(call, labels), _asked(call, ["input", "weight", "weight"]))


def _rms_norm(call: Call, labels: Labels) -> CallDims:
    return _form(call, _rows(call, labels), ["input", "statistics"])


def _rms_norm_backward(call: Call, labels: Labels) -> CallDims:
    return _form(call, _rows(call, labels), _asked(call, ["input", "weight"]))


def _groups(call: Call, labels: Labels) -> dict[str, Sequence[Dim]]:
    shape = call.shape("input")
    # Groups share out channels, and a group's statistics are over its channels and all positions: only images divide.
    dims = labels.of(shape, mixed=range(1, len(shape)))
    return {"input": dims, "statistics": [dims[0], labels.new(call["group"], mixed=True)], "weight": [dims[1]]}


def _group_norm(call: Call, labels: Labels) -> CallDims:
    return _form(call, _groups(call, labels), ["input", "statistics", "statistics"])


def _group_norm_backward(call: Call, labels: Labels) -> CallDims:
    return _form(call, _groups(call, labels), _asked(call, ["input", "weight", "weight"]))


def _channels(call: Call, labels: Labels) -> dict[str, Sequence[Dim]]:
    """Batch norm in training: channels are independent of each other."""
    shape = call.shape("input")
    # In evaluation the running statistics are used, which has another form; nothing is guessed for it.
    if not (call["training"] if call.has("training") else call["train"]):
        raise Unknown
    # A channel's statistics are over all images and positions: only channels divide.
    dims = labels.of(shape, mixed={*range(len(shape))} - {1})
    return {"input": dims, "weight": [dims[1]]}


def _batch_norm(call: Call, labels: Labels) -> CallDims:
    return _form(call, _channels(call, labels), ["input", *["weight"] * (len(call.results) - 1)])


def _batch_norm_backward(call: Call, labels: Labels) -> CallDims:
    return _form(call, _channels(call, labels), _asked(call, ["input", "weight", "weight"]))


RULES: dict[object, Rule] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
