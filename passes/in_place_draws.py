"""in_place_draws: numbers drawn in place on permuted or strided tensors are those that eager PyTorch draws.

Tracing makes ``x.bernoulli_(p)`` into ``bernoulli(x, p)``, whose result is contiguous, so that the numbers would fall
on other elements than eagerly: with a dropout in place on an image in ``channels_last``, for one. Here the tensor is
turned so that the order of its memory is that of its dimensions, and the result is turned back::

    drawn = bernoulli(x, p)    becomes    turned = permute(x, order of x in memory)
                                          drawn = clone(permute(bernoulli(turned, p), the order back))

``torch.bernoulli(x, p)`` of the user's own stays: eagerly its result is contiguous too.

``x.normal_()`` becomes ``normal_functional(x)``, which draws on a dense copy of ``x``. On the CPU, 16 or more normal
numbers for a contiguous tensor are others than those for a tensor that is not. Where ``x`` is a part of a tensor with
gaps in memory, as ``x[:, ::2]`` is, its copy would be contiguous; so here it is turned, and the result turned back::

    drawn = normal_functional(x)    becomes    turned = permute(x, dimensions reversed)
                                               drawn = permute(normal_functional(turned), dimensions reversed)

A single dimension is drawn in pairs, ``unfold(x, 0, 2, 2)``, which are turned in the same way, and what is left of an
odd number alone. Other operators that draw in place draw the same numbers when they are traced.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from roundpipe_fx.analysis.cost import layout_of
from roundpipe_fx.ir.graph_edit import insert_call, replace_by
from roundpipe_fx.ir.joint_graph import JointGraph

aten = torch.ops.aten

_UNINITIALIZED = (
    aten.empty_like.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)

_DRAWN_AT_ONCE = 16
"""From how many elements on the CPU kernel of ``normal_`` draws for contiguous tensors otherwise than for others."""


def draw_in_memory_order(joint: JointGraph) -> JointGraph:
    """Let what was drawn in place be drawn in the order of the tensor's memory. Runs before annotate."""
    for node in joint.graph.find_nodes(op="call_function", target=aten.normal_functional.default):
        _draw_as_with_gaps(node)
    for node in joint.graph.find_nodes(op="call_function", target=aten.bernoulli.p):
        source = node.args[0]
        if not isinstance(source, fx.Node) or not _was_in_place(node, source):
            continue
        order = _memory_order(source.meta["val"])
        if order is not None:
            _draw_turned(node, source, order)
    return joint


def _was_in_place(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a draw overwrote its operand.

    What ATen itself calls, as in a dropout, has no name in Dynamo's graph but the module's; it draws on new memory.
    """
    _, called = (node.meta.get("source_fn_stack") or [("", None)])[-1]
    name = getattr(called, "__name__", called)
    return name == "bernoulli_" or (name != "bernoulli" and source.target in _UNINITIALIZED)


def _memory_order(value: torch.Tensor) -> list[int] | None:
    """The dimensions, from the outermost in memory to the innermost; ``None`` if they lie as in a contiguous tensor."""
    sizes, strides = layout_of(value)
    # Dimensions of size 1 have no place in memory; in front they change nothing.
    single = [dim for dim, size in enumerate(sizes) if size == 1]
    others = [dim for dim, size in enumerate(sizes) if size != 1]
    ordered = sorted(others, key=lambda dim: -strides[dim])
    return None if ordered == others else single + ordered


def _draw_turned(node: fx.Node, source: fx.Node, order: list[int]) -> None:
    turned = insert_call(node, aten.permute.default, source, order)
    drawn = insert_call(node, aten.bernoulli.p, turned, *node.args[1:], **node.kwargs)
    back = insert_call(node, aten.permute.default, drawn, [order.index(dim) for dim in range(len(order))])
    # What reads the result was recorded with a contiguous one.
    replace_by(node, insert_call(node, aten.clone.default, back, memory_format=torch.contiguous_format))


def _draw_as_with_gaps(node: fx.Node) -> None:
    """Draw normal numbers for a tensor with gaps in memory on a copy that is not contiguous either."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value = source.meta["val"]
    sizes = layout_of(value).sizes
    if value.device.type != "cpu" or math.prod(sizes) < _DRAWN_AT_ONCE:
        return
    # Eagerly contiguous and traced contiguous, or neither: the same numbers.
    if _is_contiguous(value) or not _is_contiguous(node.meta["val"]):
        return
    several = [dim for dim, size in enumerate(sizes) if size != 1]
    if len(several) > 1:
        replace_by(node, _draw_reversed(node, source))
    elif isinstance(value.shape[several[0]], int):
        replace_by(node, _draw_in_pairs(node, source, several[0]))


def _is_contiguous(value: torch.Tensor) -> bool:
    following = 1
    for size, stride in reversed(list(zip(*layout_of(value), strict=True))):
        if size != 1 and stride != following:
            return False
        following *= size
    return True


def _draw_reversed(node: fx.Node, source: fx.Node) -> fx.Node:
    # Reversed dimensions make the copy non-contiguous, which selects the same kernel as eagerly.
    reverse = list(reversed(range(source.meta["val"].dim())))
    turned = insert_call(node, aten.permute.default, source, reverse)
    drawn = insert_call(node, aten.normal_functional.default, turned, *node.args[1:], **node.kwargs)
    return insert_call(node, aten.permute.default, drawn, reverse)


def _draw_in_pairs(node: fx.Node, source: fx.Node, dim: int) -> fx.Node:
    value = source.meta["val"]
    size = value.shape[dim]
    row = source
    for other in reversed(range(value.dim())):
        if other != dim:
            row = insert_call(node, aten.select.int, row, other, 0)
    pairs = insert_call(node, aten.unfold.default, row, 0, 2, 2)
    drawn = insert_call(node, aten.reshape.default, _draw_reversed(node, pairs), [-1])
    if size % 2:
        left = insert_call(node, aten.slice.Tensor, row, 0, size - 1, size)
        last = insert_call(node, aten.normal_functional.default, left, *node.args[1:], **node.kwargs)
        drawn = insert_call(node, aten.cat.default, [drawn, last])
    return insert_call(node, aten.reshape.default, drawn, list(value.shape))
