"""Rows: where those of a value are, and how operations divide along them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from roundpipe_fx.analysis.dimensions import Dimensions, dimensions_of, operand_nodes
from roundpipe_fx.ir.collectives import is_collective
from roundpipe_fx.ir.joint_graph import Mark, has_side_effect, is_seeded, is_tensor

_Labels = tuple[tuple[int, ...], ...]
Described = tuple[frozenset[int], list[tuple["fx.Node | None", _Labels]]]
"""How an operation divides: its mixed labels, and what it reads and makes with their labels."""

Rows = tuple[int, ...]
"""Where a value's rows are: the dimensions that they are the product of, from the outermost on.

Dimensions of one position between these are among them. Others may be between them only inside of a region: rows of
logits ``[B, V, T]`` are dimensions 0 and 2.
"""


def labels_of_rows(node: fx.Node, dimensions: Dimensions, where: Mapping[fx.Node, Rows]) -> tuple[int, ...]:
    """The labels of a member's rows; none for one that is the same for each tile."""
    return labels_where(_pairs(node, dimensions), where)


def labels_where(pairs: Iterable[tuple[fx.Node | None, _Labels]], where: Mapping[fx.Node, Rows]) -> tuple[int, ...]:
    """The labels of the rows of an operation that reads or makes these; none where none of them has rows."""
    return next((_of_rows(labels, where[value]) for value, labels in pairs if value is not None and value in where), ())


def _pairs(node: fx.Node, dimensions: Dimensions) -> list[tuple[fx.Node | None, _Labels]]:
    return [
        *zip(operand_nodes(node), dimensions.operands, strict=True),
        *zip(_results(node, dimensions), dimensions.results, strict=True),
    ]


def described(node: fx.Node) -> Described | None:
    """Describe the dimensions of an operation; ``None``: they are not known."""
    dimensions = dimensions_of(node)
    return None if dimensions is None else (dimensions.mixed, _pairs(node, dimensions))


def _results(node: fx.Node, dimensions: Dimensions) -> list[fx.Node | None]:
    """The values of a node's results; ``None`` where nobody reads one."""
    if is_tensor(node):
        return [node]
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    value = node.meta["val"]
    positions = [position for position, item in enumerate(value) if isinstance(item, torch.Tensor)]
    nodes_of_results = [items.get(position) for position in positions]
    # What is nested deeper is not told apart.
    return nodes_of_results if len(nodes_of_results) == len(dimensions.results) else [None] * len(dimensions.results)


def _of_rows(labels: _Labels, rows: Rows) -> tuple[int, ...]:
    return tuple(label for position in rows for label in labels[position])


def rows_among(labels: _Labels, wanted: tuple[int, ...]) -> Rows | bool | None:
    """The dimensions that are the product of ``wanted``; ``False``: it has none of these; ``None``: not so."""
    touched = [dim for dim, labels_of_dim in enumerate(labels) if set(labels_of_dim) & set(wanted)]
    if not touched:
        return False
    rows = tuple(dim for dim in range(touched[0], touched[-1] + 1) if dim in touched or not labels[dim])
    return rows if _of_rows(labels, rows) == wanted else None


def is_adjacent(rows: Rows) -> bool:
    """Return whether no other dimensions are between those of rows."""
    return rows[-1] - rows[0] == len(rows) - 1


def elements(node: fx.Node) -> int:
    """Number of elements of a tensor whose sizes are known; else 0."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return 0
    return int(value.numel())


def may_be_divided(node: fx.Node) -> bool:
    """Return whether an operation may be carried out on some rows after others, if it works on each alone."""
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and not is_seeded(node)
        and not has_side_effect(node)
        and Mark.MUST_SAVE not in node.meta
        and "unbacked_bindings" not in node.meta
        and not is_collective(node.target)
    )
