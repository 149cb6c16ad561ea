"""Along which dimensions the work of one operation divides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.dimensions import (
    along,
    attention,
    convolutions,
    creation,
    indexing,
    losses,
    normalization,
    parts,
    pointwise,
    products,
    reductions,
    views,
)
from roundpipe_fx.analysis.dimensions.labels import Dimensions, Labels, Rule, Unknown
from roundpipe_fx.analysis.dimensions.operands import Call, tensor_arguments
from roundpipe_fx.ir.joint_graph import is_seeded, tensor_values

RULES: dict[Any, Rule] = {
    **pointwise.RULES,
    **products.RULES,
    **views.RULES,
    **parts.RULES,
    **along.RULES,
    **reductions.RULES,
    **indexing.RULES,
    **creation.RULES,
    **normalization.RULES,
    **losses.RULES,
    **convolutions.RULES,
    **attention.RULES,
}
"""The rule of each operator that is described, beside those that PyTorch tags as pointwise."""


def dimensions_of(node: fx.Node) -> Dimensions | None:
    """Along which dimensions the work of an operation divides.

    Sizes may be symbolic; no guards are added.

    Args:
        node: a node of a captured graph, with fake values.

    Returns:
        Its dimensions; ``None`` for operators that are not known, that draw random numbers or write in place, and for
        forms of operators that are not known. Nothing is guessed.
    """
    rule = _rule(node)
    results = tensor_values(node)
    # A tuple without tensors (sizes, symbolic numbers) has no dimensions to divide.
    if rule is None or not results or not _is_plain(node, results):
        return None
    labels = Labels()
    try:
        operands, of_results = rule(Call(node, results), labels)
    except Unknown:
        return None
    arguments = tensor_arguments(node)
    # Rules give dimensions by name of the argument; consumers read them in the order of ``operand_nodes``.
    of_operands = [dims for name, _ in arguments for dims in operands.get(name, ())]
    tensors = [operand.meta["val"] for _, nodes in arguments for operand in nodes]
    # A rule that met a form that it was not written for (an optional operand, another rank) shows here.
    if not (_fits(of_operands, tensors) and _fits(of_results, results)):
        return None
    # Labels of broadcast dimensions that nothing has are dropped, so that a caller does not try to divide them.
    used = {label for dims in (*of_operands, *of_results) for dim in dims for label in dim}
    return Dimensions(
        operands=tuple(tuple(dims) for dims in of_operands),
        results=tuple(tuple(dims) for dims in of_results),
        sizes={label: size for label, size in labels.sizes.items() if label in used},
        mixed=frozenset(labels.mixed & used),
    )


def _rule(node: fx.Node) -> Rule | None:
    target = node.target
    # An operator that writes in place would write tiles into the whole.
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    if target in RULES:
        return RULES[target]
    # Random numbers are drawn in the order of elements: tiles would draw others.
    return pointwise.pointwise if pointwise.is_pointwise(target) and not is_seeded(node) else None


def _is_plain(node: fx.Node, results: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors are strided, and known."""
    if any("val" not in operand.meta for operand in node.all_input_nodes):
        return False
    values = [value for operand in node.all_input_nodes for value in tensor_values(operand)]
    return all(value.layout is torch.strided and not value.is_nested for value in (*values, *results))


def _fits(dims: Sequence[Sequence[Any]], tensors: Sequence[torch.Tensor]) -> bool:
    return [len(of_one) for of_one in dims] == [tensor.dim() for tensor in tensors]
