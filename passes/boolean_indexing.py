"""boolean_indexing: indexing by a mask becomes one ``nonzero`` and integer indexing.

This is how the kernels themselves expand it, so the values are bitwise equal. But the host synchronization (which
positions does the mask select?) becomes a separate operation, which runs once for all reads and writes by that mask,
forward and backward, and its small integer result can be saved in place of the mask.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.graph_edit import inherit_origin, insert_call, substitute_node
from roundpipe_fx.ir.joint_graph import JointGraph, is_mask
from roundpipe_fx.torch_private import note_count, size_binding

aten = torch.ops.aten


def expand_boolean_indexing(joint: JointGraph) -> JointGraph:
    """Rewrite mask indexing as one ``nonzero`` per mask and integer indexing. Runs before annotate.

    ``index``, ``index_put``, ``masked_select`` and the backward of ``masked_scatter`` by the same mask share the
    ``nonzero``. The values are bitwise equal, because the kernels do the same expansion.
    """
    shared: dict[fx.Node, list[fx.Node]] = {}
    for node in list(joint.computed()):
        if node.target is aten.index.Tensor or _is_index_put(node):
            _expand_index(joint, node, shared)
        elif node.target is aten.masked_select.default:
            _expand_masked_select(joint, node, shared)
        elif node.target is aten.masked_scatter_backward.default:
            _expand_masked_scatter_backward(joint, node, shared)
    return joint


def _is_index_put(node: fx.Node) -> bool:
    return node.target in (aten.index_put.default, aten._unsafe_index_put.default, aten._index_put_impl.default)


def _expand_index(joint: JointGraph, node: fx.Node, shared: dict[fx.Node, list[fx.Node]]) -> None:
    indices = list(node.args[1])  # type: ignore[arg-type]
    # Other indices (integers, slices as None) stay where they are; a mask becomes one index per dimension of its own.
    masks = [index for index in indices if isinstance(index, fx.Node) and is_mask(index)]
    if not masks:
        return
    expanded: list[Any] = []
    for index in indices:
        if index in masks:
            expanded += _coordinates(joint, index, node, shared)
        else:
            expanded.append(index)
    node.update_arg(1, expanded)


def _expand_masked_select(joint: JointGraph, node: fx.Node, shared: dict[fx.Node, list[fx.Node]]) -> None:
    value, mask = node.args
    assert isinstance(value, fx.Node) and isinstance(mask, fx.Node)
    shape = torch.broadcast_shapes(value.meta["val"].shape, mask.meta["val"].shape)
    # With symbolic sizes the broadcast would need nodes for them.
    if any(not isinstance(size, int) for size in shape):
        return  # hoisted as it is
    with joint.graph.inserting_before(node):
        value, mask = (_expanded(joint, item, list(shape), node) for item in (value, mask))
    coordinates = _coordinates(joint, mask, node, shared)
    with joint.graph.inserting_before(node):
        selected = joint.graph.call_function(aten.index.Tensor, (value, coordinates))
    inherit_origin(selected, node)
    selected.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(selected)
    joint.graph.erase_node(node)


def _expand_masked_scatter_backward(joint: JointGraph, node: fx.Node, shared: dict[fx.Node, list[fx.Node]]) -> None:
    """The gradient of the scattered values: the selected gradients in order, then zeros for the values that were left
    over."""
    gradient, mask, sizes = node.args
    assert isinstance(gradient, fx.Node) and isinstance(mask, fx.Node) and isinstance(sizes, (list, tuple))
    if _shape_text(gradient) != _shape_text(mask):
        # Broadcast by an operation, which needs no node for any size, at the place where the forward scatters.
        forward = next((user for user in mask.users if user.target is aten.masked_scatter.default), None)
        at, example = (node, gradient) if forward is None else (forward, forward.args[0])
        everywhere = insert_call(at, aten.ones_like.default, example, dtype=torch.bool)
        mask = insert_call(at, aten.logical_and.default, everywhere, mask)
    # The same coordinates select in the backward what the forward has scattered.
    coordinates = _coordinates(joint, mask, node, shared)
    value = gradient.meta["val"]
    selected = insert_call(node, aten.index.Tensor, gradient, coordinates)
    count = insert_call(node, aten.sym_size.int, coordinates[0], 0)
    first = insert_call(node, aten.arange.default, count, dtype=torch.int64, device=value.device)
    zeros = insert_call(node, aten.new_zeros.default, gradient, [_product(node, sizes)])
    filled = insert_call(node, aten.index_put.default, zeros, [first], selected)
    result = insert_call(node, aten.view.default, filled, list(sizes))
    substitute_node(node, result)
    joint.graph.erase_node(node)


def _shape_text(node: fx.Node) -> str:
    """To compare shapes by: comparing symbols would guard on them."""
    return str(tuple(node.meta["val"].shape))


def _product(before: fx.Node, sizes: Sequence[Any]) -> Any:
    """The product of sizes, of which some may be computed by nodes."""
    product: Any = math.prod(size for size in sizes if isinstance(size, int))
    for size in sizes:
        if not isinstance(size, int):
            product = insert_call(before, operator.mul, size, product)
    return product


def _expanded(joint: JointGraph, node: fx.Node, shape: list[int], example: fx.Node) -> fx.Node:
    if list(node.meta["val"].shape) == shape:
        return node
    expanded = joint.graph.call_function(aten.expand.default, (node, shape))
    inherit_origin(expanded, example)
    expanded.meta["val"] = node.meta["val"].expand(shape)
    return expanded


def _coordinates(
    joint: JointGraph, mask: fx.Node, user: fx.Node, shared: dict[fx.Node, list[fx.Node]]
) -> list[fx.Node]:
    """The integer index tensors that are equivalent to ``mask``: the columns of its ``nonzero``."""
    if mask in shared:
        return shared[mask]
    graph = joint.graph
    value = mask.meta["val"]
    # Behind the mask, so that every later reader can share it, in whatever phase.
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1] if mask.op == "placeholder" else mask):
        nonzero = graph.call_function(aten.nonzero.default, (mask,))
    inherit_origin(nonzero, mask if mask.op == "call_function" else user)
    nonzero.meta["partitioner_tag"] = "is_backward" if _in_backward(mask) else "is_forward"
    count = _count_of(value, user)
    with value.fake_mode:
        nonzero.meta["val"] = torch.empty_strided(
            (count, value.dim()), (1, count), dtype=torch.int64, device=value.device
        )  # column by column, as the kernels lay it out
    # If the mask operation bound the size, it is now the nonzero, which runs first, that does.
    user.meta.pop("unbacked_bindings", None)
    nonzero.meta["unbacked_bindings"] = size_binding(count)
    columns = []
    after = nonzero
    # One column of coordinates for each dimension of the mask.
    for dim in range(value.dim()):
        with graph.inserting_after(after):
            after = graph.call_function(aten.select.int, (nonzero, 1, dim))
        inherit_origin(after, nonzero)
        after.meta["val"] = nonzero.meta["val"].select(1, dim)
        columns.append(after)
    shared[mask] = columns
    return columns


def _count_of(mask: torch.Tensor, user: fx.Node) -> Any:
    """Number of positions that the mask selects: the symbol of the mask operation's own result, or a new one."""
    if user.target in (aten.index.Tensor, aten.masked_select.default):
        before = _position_of_selected(user)
        return user.meta["val"].shape[before]
    shape_env = mask.fake_mode.shape_env  # type: ignore[attr-defined]
    with shape_env.ignore_fresh_unbacked_symbols():
        # The number of selected elements is known only when the operation has run: a new symbol between 0 and all.
        count = shape_env.create_unbacked_symint()
    torch._check(count >= 0)
    torch._check(count <= mask.numel())
    note_count(count, mask.shape)
    return count


def _position_of_selected(user: fx.Node) -> int:
    """Which dimension of an ``index`` result runs over the selected positions."""
    if user.target is aten.masked_select.default:
        return 0
    indices = list(user.args[1])  # type: ignore[arg-type]
    used = [position for position, index in enumerate(indices) if index is not None]
    # As NumPy: adjacent indices leave the result's dimension where they are, others move it to the front.
    adjacent = used == list(range(used[0], used[-1] + 1))
    return used[0] if adjacent else 0


def _in_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"
