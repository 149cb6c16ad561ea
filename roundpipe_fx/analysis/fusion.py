"""Fusion: operations that a stage compiler computes inside the kernel that reads them.

Such a value is *virtual* where it is recomputed beside its readers: it takes no memory, and its operands are read from
where they are. Saved, it takes all of its bytes::

    saved     x ──▶ gelu(x) ══ memory ══▶ product's gradient
    virtual   x ══ memory ══▶ [gelu(x), …] in one kernel

The operators are those that PyTorch's partitioner takes to be fusible, without reductions: these are computed once,
since their results are narrow.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import Mark, has_side_effect, has_tag, is_seeded, is_tensor, is_view

__all__ = ["dropped_operands", "is_fusible"]

aten = torch.ops.aten

_FUSIBLE = frozenset(
    {
        aten._to_copy.default,
        aten.arange.start_step,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.empty_like.default,
        aten.full.default,
        aten.full_like.default,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.native_dropout_backward.default,
        aten.ones_like.default,
        aten.scalar_tensor.default,
        aten.tril.default,
        aten.triu.default,
        aten.where.self,
        aten.zeros_like.default,
        torch.ops.prims.convert_element_type.default,
        torch.ops.prims.iota.default,
    }
)
"""Operators that are fused although they are not tagged as pointwise."""


def is_fusible(node: fx.Node) -> bool:
    """Test for an operation that may be repeated inside the kernels that read its result.

    Args:
        node: of an annotated graph. Views are not fusible: they compute nothing.
    """
    if dropped_operands(node) is not None:
        return True
    if node.op != "call_function" or not is_tensor(node) or is_view(node) or Mark.MUST_SAVE in node.meta:
        return False
    if not has_tag(node.target, torch.Tag.pointwise) and node.target not in _FUSIBLE:
        return False
    value = node.meta["val"]
    return value.layout is torch.strided and not is_seeded(node) and not has_side_effect(node)


def dropped_operands(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """Operands of the products that a dropout's result is, if it is one: its input, its mask, and the factor."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    (maker,) = node.all_input_nodes
    if maker.target is not aten.native_dropout.default:
        return None
    source, probability, train = maker.args
    mask = next((user for user in maker.users if user.target is operator.getitem and user.args[1] == 1), None)
    if not isinstance(source, fx.Node) or not isinstance(probability, float) or train is False or mask is None:
        return None
    return (source, mask, 1 / (1 - probability)) if 0 < probability < 1 else None
