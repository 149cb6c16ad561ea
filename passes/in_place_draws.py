"""in_place_draws: ``bernoulli_`` on a tensor with permuted dimensions in memory draws in the order of its memory.

Tracing makes ``x.bernoulli_(p)`` into ``bernoulli(x, p)``, whose result is contiguous, so that the numbers would fall
on other elements than eagerly: with a dropout in place on an image in ``channels_last``, for one. Here the tensor is
turned so that the order of its memory is that of its dimensions, and the result is turned back::

    drawn = bernoulli(x, p)    becomes    turned = permute(x, order of x in memory)
                                          drawn = clone(permute(bernoulli(turned, p), the order back))

Other operators that draw in place keep the order when they are traced. ``torch.bernoulli(x, p)`` of the user's own
stays: eagerly its result is contiguous too.
"""

from __future__ import annotations

import torch
from torch import fx

from roundpipe_fx.analysis.cost import layout_of
from roundpipe_fx.ir.graph_edit import insert_call, replace_by
from roundpipe_fx.ir.joint_graph import JointGraph

__all__ = ["draw_in_memory_order"]

aten = torch.ops.aten

_UNINITIALIZED = (
    aten.empty_like.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)


def draw_in_memory_order(joint: JointGraph) -> JointGraph:
    """Let what was drawn in place be drawn in the order of the tensor's memory. Runs before annotate."""
    for node in joint.graph.find_nodes(op="call_function", target=aten.bernoulli.p):
        source = node.args[0]
        if not isinstance(source, fx.Node) or not _was_in_place(node, source):
            continue
        order = _memory_order(source.meta["val"])
        if order is not None:
            _draw_turned(node, source, order)
    return joint


def _was_in_place(node: fx.Node, source: fx.Node) -> bool:
    """Whether a draw overwrote its operand.

    What ATen itself calls, as in a dropout, has no name in Dynamo's graph but the module's; it draws on new memory.
    """
    _, called = (node.meta.get("source_fn_stack") or [("", None)])[-1]
    return getattr(called, "__name__", called) == "bernoulli_" or source.target in _UNINITIALIZED


def _memory_order(value: torch.Tensor) -> list[int] | None:
    """The dimensions, from the outermost in memory to the innermost; ``None`` if they lie as in a contiguous tensor."""
    sizes, strides = layout_of(value)
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
