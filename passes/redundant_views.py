"""redundant_views: views that equal an earlier value are dropped.

AOTAutograd detaches what autograd saves, and the gradient of a linear layer's weight is transposed twice. Each such
view is one more operation to dispatch, to read in emitted code and to plan around; their readers read the earlier value
instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph, input_nodes, is_tensor, is_view

aten = torch.ops.aten


def remove_redundant_views(joint: JointGraph) -> JointGraph:
    """Replace views that change nothing, alone or together with the views before them, by the value they equal.

    Outputs of the forward stay as they are: AOTAutograd has recorded which of these tensors are views of which.
    """
    returned = {value for value in joint.forward_outputs if isinstance(value, fx.Node)}
    output = joint.graph.output_node()
    for node in list(joint.computed()):
        if node in returned or not _is_plain_view(node):
            continue
        earlier = _shown_earlier(node)
        if earlier is None or earlier in returned or earlier in joint.mutated_inputs:
            continue
        if output in node.users and (earlier.op == "placeholder" or output in earlier.users):
            continue  # each gradient is a separate tensor
        node.replace_all_uses_with(earlier)
        _drop_unread(joint, node, earlier)
    return joint


def _drop_unread(joint: JointGraph, node: fx.Node, earlier: fx.Node) -> None:
    """Erase a view without readers, and those on the way to it from an earlier value."""
    while node is not earlier and not node.users:
        (source,) = input_nodes(node)
        joint.graph.erase_node(node)
        node = source


def _is_plain_view(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.is_mutable
        # Its elements depend on the real strides of its operand, which are not always the recorded ones.
        and node.target is not aten.as_strided.default
        and is_tensor(node)
        and len(input_nodes(node)) == 1
        and is_tensor(input_nodes(node)[0])
        and is_view(node)
    )


def _shown_earlier(node: fx.Node) -> fx.Node | None:
    """The last of a plain view's bases that equals it; ``None`` if there is none."""
    shown = _description(node)
    (earlier,) = input_nodes(node)
    while _description(earlier) != shown:
        if not _is_plain_view(earlier):
            return None
        (earlier,) = input_nodes(earlier)
    return earlier


def _description(node: fx.Node) -> tuple[Any, ...]:
    """The part of its storage that a tensor covers. Sizes as text: comparing symbolic sizes would add guards."""
    value: torch.Tensor = node.meta["val"]
    return (
        str((*value.shape, "strides", *value.stride(), value.storage_offset())),
        value.dtype,
        value.is_conj(),
        value.is_neg(),
    )
