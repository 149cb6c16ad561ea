"""channels_last: record the strides in which Inductor computes convolutions, channels innermost in memory.

Inductor converts the operands of two-dimensional convolutions where it gains by that (*layout optimization*), and
values between them are then in this order too. Within one module that needs no help. Between modules values have the
strides that the graph records, and what the forward hands to the backward would be converted, kept and read in the
order of the eager model::

    as captured    x ─▶ conv ─▶ to channels first ═▶ relu ─▶ …      each kernel converts, each value is kept so
    after          x, w ─▶ to channels last ─▶ conv ═▶ relu ─▶ …    only what enters and what leaves is converted

The pass inserts the conversions of operands that are not in this order, and records the strides that follow. Outputs of
the graph, gradients of weights among them, are converted back. The gradient of group normalization is given what
autograd promises its kernel: an incoming gradient in the order of the input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import layout_of
from roundpipe_fx.analysis.fake_results import same_dimension_order
from roundpipe_fx.analysis.recorded_values import RecordedValues, copy_in_order
from roundpipe_fx.ir.graph_edit import inherit_origin, insert_call
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.torch_private import inductor_wants_channels_last

aten = torch.ops.aten

_OPERANDS: Mapping[Any, int] = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
"""How many operands are images or weights: the incoming gradient, the input, the weight."""


def put_channels_last(joint: JointGraph, on_cpu: bool, options: Mapping[str, Any]) -> JointGraph:
    """Convert the operands of convolutions, if Inductor would. Runs before annotate.

    Args:
        joint: the graph; it is rewritten.
        on_cpu: whether it runs on a CPU.
        options: names and values of Inductor's settings.

    Returns:
        The same graph.
    """
    if not inductor_wants_channels_last(joint.module, on_cpu, options):
        return joint
    values = RecordedValues(joint)
    # Forward and backward share the conversion of an input or a weight.
    converted: dict[fx.Node, fx.Node] = {}
    for node in list(joint.computed()):
        if node.target is aten.native_group_norm_backward.default:
            gradient, source = node.args[:2]
            assert isinstance(gradient, fx.Node) and isinstance(source, fx.Node)
            if not same_dimension_order(gradient.meta["val"], source.meta["val"]):
                node.replace_input_with(gradient, copy_in_order(gradient, source.meta["val"]))
        if node.target not in _OPERANDS or node.args[1].meta["val"].dim() != 4:  # type: ignore[union-attr]
            values.visit(node)
            continue
        for source in dict.fromkeys(node.args[: _OPERANDS[node.target]]):
            assert isinstance(source, fx.Node)
            if _has_channels_last(source.meta["val"]):
                continue
            if source not in converted:
                converted[source] = insert_call(node, aten.clone.default, source, memory_format=torch.channels_last)
                inherit_origin(converted[source], node)
            node.replace_input_with(source, converted[source])
        accepted = values.recompute(node)
        assert accepted, f"{node.format_node()} does not accept operands whose channels lie innermost"
    output = joint.module.graph.output_node()
    for source in output.all_input_nodes:
        values.restore(output, source)
    return joint


def _has_channels_last(value: torch.Tensor) -> bool:
    """Return whether the channels of images lie innermost in memory, without gaps."""
    sizes, strides = layout_of(value)
    following = 1
    for dim in (1, 3, 2, 0):
        if sizes[dim] > 1 and strides[dim] != following:
            return False
        following *= sizes[dim]
    return True
