"""Convolutions, pooling and resampling: places in an image are mixed, images and mostly channels are not."""

from __future__ import annotations

import torch

from roundpipe_fx.analysis.dimensions.labels import CallDims, Dim, Labels, Rule, Unknown
from roundpipe_fx.analysis.dimensions.operands import Call
from roundpipe_fx.torch_private import maxima_with_offsets, positions_of_offsets

aten = torch.ops.aten


def _tensors(call: Call, labels: Labels, input_name: str, output: tuple[object, ...]) -> dict[str, list[Dim]]:
    """Dimensions of a convolution's input, weight, bias and output."""
    shape, weight = call.shape(input_name), call.shape("weight")
    if len(shape) != len(weight):
        raise Unknown  # one image, without a batch
    # With groups, channel i of the output reads the channels of its group alone, and a tile of channels may cut one.
    grouped = call["groups"] != 1
    batch = labels.new(shape[0])
    # The number of inward channels is the input's; each output is a sum over them, so they may be summed over tiles.
    inward, outward = labels.new(shape[1], mixed=grouped), labels.new(output[1], mixed=grouped)
    if grouped:
        of_weight = list(labels.all_mixed(weight[:2]))
    else:
        of_weight = [inward, outward] if call["transposed"] else [outward, inward]
    return {
        "input": [batch, inward, *labels.all_mixed(shape[2:])],
        "weight": [*of_weight, *labels.all_mixed(weight[2:])],
        "bias": [outward],
        "output": [batch, outward, *labels.all_mixed(output[2:])],
    }


def _convolution(call: Call, labels: Labels) -> CallDims:
    dims = _tensors(call, labels, "input", call.results[0])
    if "bias" in call.tensors:
        labels.mix([dims["input"][1]])  # each tile would add it
    return {name: [dims[name]] for name in call.tensors}, [dims["output"]]


def _convolution_backward(call: Call, labels: Labels) -> CallDims:
    dims = _tensors(call, labels, "input", call.shape("grad_output"))
    asked = [name for name, is_asked in zip(("input", "weight", "bias"), call["output_mask"], strict=True) if is_asked]
    if "bias" in asked:
        labels.mix([dims["input"][1]])  # its gradient does not depend on the input
    operands = {"grad_output": [dims["output"]], "input": [dims["input"]], "weight": [dims["weight"]]}
    return operands, [dims[name] for name in asked]


def _planes(spatial: int) -> Rule:
    """All tensors have the same leading dimensions; in the last ones places depend on each other."""

    def rule(call: Call, labels: Labels) -> CallDims:
        result = call.results[0]
        leading = labels.of(result[: len(result) - spatial])

        def dims_of(shape: tuple[object, ...]) -> list[Dim]:
            # Everything but the planes themselves divides: batch and channels.
            kept = labels.same(shape[: len(shape) - spatial], leading)
            return [*kept, *labels.all_mixed(shape[len(shape) - spatial :])]

        operands = {
            name: [dims_of(tuple(tensor.shape)) for tensor in tensors] for name, tensors in call.tensors.items()
        }
        return operands, [dims_of(shape) for shape in call.results]

    return rule


def _windows(call: Call, labels: Labels) -> CallDims:
    """Planes or volumes, as windows have dimensions."""
    return _planes(len(call["kernel_size"]))(call, labels)


PLANES = {
    2: (
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.avg_pool2d.default,
        aten.avg_pool2d_backward.default,
        aten._adaptive_avg_pool2d.default,
        aten._adaptive_avg_pool2d_backward.default,
        aten.upsample_nearest2d.default,
        aten.upsample_nearest2d_backward.default,
        aten._upsample_nearest_exact2d.default,
        aten._upsample_nearest_exact2d_backward.default,
        aten.upsample_bilinear2d.default,
        aten.upsample_bilinear2d_backward.default,
        aten.upsample_bicubic2d.default,
        aten.upsample_bicubic2d_backward.default,
        aten.reflection_pad2d.default,
        aten.reflection_pad2d_backward.default,
        aten.replication_pad2d.default,
        aten.replication_pad2d_backward.default,
    ),
    3: (
        aten.max_pool3d_with_indices.default,
        aten.max_pool3d_with_indices_backward.default,
        aten.avg_pool3d.default,
        aten.avg_pool3d_backward.default,
    ),
}
"""Operators on planes and volumes."""

RULES: dict[object, Rule] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    maxima_with_offsets: _windows,
    positions_of_offsets: _windows,
    **{operator: _planes(spatial) for spatial, operators in PLANES.items() for operator in operators},
}
