"""channels_last: record the strides in which Inductor computes convolutions, channels innermost in memory.

Inductor converts the operands of two-dimensional convolutions where it gains by that (*layout optimization*), and
values between them are then in this order too. Within one module that needs no help. Between modules values have the
strides that the graph records, and what the forward hands to the backward would be converted, kept and read in the
order of the eager model::

    as captured    x ─▶ conv ─▶ to channels first ═▶ relu ─▶ …      each kernel converts, each value is kept so
    after          x, w ─▶ to channels last ─▶ conv ═▶ relu ─▶ …    only what enters and what leaves is converted

The pass inserts the conversions of operands that are not in this order, if another operand is of pointwise operations
and of joined images too (Inductor would join them in one order, and then copy the whole in the other), and records the
strides that follow. Outputs of the graph, gradients of weights among them, are converted back. The gradient of group
normalization is given what autograd promises its kernel: an incoming gradient in the order of the input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import layout_of
from roundpipe_fx.analysis.fake_results import same_dimension_order
from roundpipe_fx.analysis.recorded_values import RecordedValues, copy_in_order
from roundpipe_fx.ir.graph_edit import insert_call
from roundpipe_fx.ir.joint_graph import JointGraph, has_tag, is_tensor
from roundpipe_fx.torch_private import inductor_wants_channels_last

aten = torch.ops.aten

_OPERANDS: Mapping[Any, int] = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
"""Number of leading operands that have channels: the incoming gradient, the input, the weight."""


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
        if operands := _find_operands(node):
            for source in operands:
                if _has_channels_last(source.meta["val"]):
                    continue
                if source not in converted:
                    converted[source] = _insert_conversion(node, source)
                node.replace_input_with(source, converted[source])
        elif _mixes_orders(node):
            # Fused with the operation: one result in this order instead of one that the next convolution converts.
            for source in _find_images(node):
                if not _has_channels_last(source.meta["val"]):
                    node.replace_input_with(source, _insert_conversion(node, source))
        else:
            _keep_promise_to_group_norm(node)
            values.visit(node)
            continue
        accepted = values.recompute(node)
        assert accepted, f"{node.format_node()} does not accept operands whose channels lie innermost"
    output = joint.module.graph.output_node()
    for source in output.all_input_nodes:
        values.restore(output, source)
    return joint


def _find_operands(node: fx.Node) -> list[fx.Node]:
    """Operands of a two-dimensional convolution, or of its gradient, that have channels; of other operations none."""
    operands = [source for source in node.args[: _OPERANDS.get(node.target, 0)] if isinstance(source, fx.Node)]
    return list(dict.fromkeys(source for source in operands if source.meta["val"].dim() == 4))


def _keep_promise_to_group_norm(node: fx.Node) -> None:
    if node.target is not aten.native_group_norm_backward.default:
        return
    gradient, normalized = node.all_input_nodes[:2]
    if not same_dimension_order(gradient.meta["val"], normalized.meta["val"]):
        node.replace_input_with(gradient, copy_in_order(gradient, normalized.meta["val"]))


def _insert_conversion(before: fx.Node, source: fx.Node) -> fx.Node:
    return insert_call(before, aten.clone.default, source, memory_format=torch.channels_last)


def _mixes_orders(node: fx.Node) -> bool:
    """Test for an operation on images of which some have channels innermost in memory, and others have not: a pointwise
    one, or one that joins them."""
    orders = {_has_channels_last(source.meta["val"]) for source in _find_images(node)}
    return len(orders) == 2 and (node.target is aten.cat.default or has_tag(node.target, torch.Tag.pointwise))


def _find_images(node: fx.Node) -> list[fx.Node]:
    """Operands of the result's shape, if that has four dimensions, or parts of it, whose order in memory matters."""
    if not is_tensor(node) or node.meta["val"].dim() != 4:
        return []
    operands = [source for source in node.all_input_nodes if is_tensor(source)]
    if node.target is not aten.cat.default:
        sizes, _ = layout_of(node.meta["val"])
        operands = [source for source in operands if layout_of(source.meta["val"]).sizes == sizes]
    return [source for source in operands if _has_order(source.meta["val"])]


def _has_order(value: torch.Tensor) -> bool:
    """Return whether it matters if the channels of images lie innermost in memory."""
    sizes, _ = layout_of(value)
    return len(sizes) == 4 and sizes[1] != 1 and sizes[2] * sizes[3] != 1


def _has_channels_last(value: torch.Tensor) -> bool:
    """Return whether the channels of images lie innermost in memory, without gaps."""
    sizes, strides = layout_of(value)
    following = 1
    for dim in (1, 3, 2, 0):
        if sizes[dim] > 1 and strides[dim] != following:
            return False
        following *= sizes[dim]
    return True
