"""storage_copies: operators that would copy a whole storage copy only their operand.

``slice_scatter``, ``select_scatter``, ``diagonal_scatter``, ``as_strided_scatter`` and ``copy`` return their first
operand with something written into it, and keep its strides. To do so they copy the operand's whole storage: if a batch
is a slice of a data set, all of the data set. Its size is not even known, since a graph may run with slices of other
data sets. This pass copies such an operand first, with its strides and without the rest of the storage; then the copy
is written over (:mod:`roundpipe_fx.passes.reinplace`). The values are bitwise equal.

In-place writes into a part of a buffer are traced as these operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import layout_of
from roundpipe_fx.ir.graph_edit import insert_call, substitute_node, views_of
from roundpipe_fx.ir.joint_graph import JointGraph, is_tensor, viewed
from roundpipe_fx.operators.partial_writes import PARTIAL_WRITES, copy_alike
from roundpipe_fx.torch_private import size_hint

aten = torch.ops.aten


def copy_parts_only(joint: JointGraph) -> JointGraph:
    """Rewrite operators that would copy a whole storage. Runs before layouts are restored."""
    changed = False
    for node in list(joint.computed()):
        if node.target is aten.copy.default:
            changed |= _drop_copy(node)
    for node in list(joint.computed()):
        if (node.target in PARTIAL_WRITES or node.target is aten.copy.default) and node.users:
            changed |= _copy_operand(node)
    if changed:
        joint.drop_unread()
    return joint


def _drop_copy(node: fx.Node) -> bool:
    """Read a value itself, or write to it, instead of a copy that would take its place."""
    source = node.args[1]
    if not isinstance(source, fx.Node) or not is_tensor(source):
        return False
    old, new = source.meta["val"], node.meta["val"]
    if old.layout is not torch.strided or old.dtype != new.dtype or old.device != new.device:
        return False
    if str(tuple(old.shape)) != str(tuple(new.shape)):
        return False
    dropped = False
    for user in list(node.users):
        if user.target in PARTIAL_WRITES and user.args[1] is node and user.args[0] is not node:
            user.update_arg(1, source)
            dropped = True
    # Two values that are returned stay two tensors.
    both_returned = _is_returned(node) and _is_returned(viewed(source))
    if str(old.stride()) == str(new.stride()) and viewed(source).op != "placeholder" and not both_returned:
        substitute_node(node, source)
        dropped = True
    return dropped


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" for shown in (node, *views_of(node)) for user in shown.users)


def _copy_operand(node: fx.Node) -> bool:
    operand: Any = node.args[0]
    value: torch.Tensor = operand.meta["val"]
    if value.layout is not torch.strided or not _may_lie_in_more(operand) or not _reaches_no_further(node, value):
        return False
    sizes, strides = layout_of(value)
    if _is_dense(sizes, strides):
        fresh = insert_call(node, aten.clone.default, operand)
    elif 0 in strides:
        return False  # an expanded value is copied to full size
    else:
        fresh = insert_call(node, copy_alike, operand)
    node.update_arg(0, fresh)
    return True


def _may_lie_in_more(node: fx.Node) -> bool:
    """Test for a value whose storage may hold more: a graph input, or a part of another value."""
    if viewed(node).op == "placeholder":
        return True
    value = node.meta["val"]
    return size_hint(value.untyped_storage().nbytes()) > size_hint(value.numel()) * value.dtype.itemsize


def _reaches_no_further(node: fx.Node, value: torch.Tensor) -> bool:
    """Return whether the written part is within the operand; ``as_strided_scatter`` addresses the whole storage."""
    if node.target is not aten.as_strided_scatter.default:
        return True
    size, stride, offset = (*node.args[2:5], None)[:3]
    numbers: list[Any] = [*size, *stride, offset or 0, value.storage_offset()]  # type: ignore[misc]
    if not all(isinstance(number, int) for number in numbers) or value.storage_offset():
        return False
    return (offset or 0) + _extent(size, stride) <= _extent(*layout_of(value))  # type: ignore[operator, arg-type]


def _extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    following = 1
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size != 1):
        if stride != following:
            return False
        following *= size
    return True
