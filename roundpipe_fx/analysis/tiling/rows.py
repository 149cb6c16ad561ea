"""Rows: where those of a value are, and how operations divide along them.

A region has a number of rows. The dimensions of a value that its rows are in may have a multiple of as many positions:
then each row is that many positions. Attention with 2 heads of keys and 8 of queries has 2 rows::

    queries [1, 8, 64, 16]       dimension 1: a row is 4 heads, labels (2, 4), of which the first is divided
    keys    [1, 2, 64, 16]       dimension 1: a row is a head, label (2)
    x @ wq  [64, 128]            dimension 1: a row is 64 positions, labels (8, 16) where it is viewed as heads
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from roundpipe_fx.analysis.dimensions import Dimensions, dimensions_of, operand_nodes
from roundpipe_fx.ir.collectives import is_collective
from roundpipe_fx.ir.joint_graph import Mark, has_side_effect, is_seeded, is_tensor

_Labels = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Described:
    """The way an operation divides.

    Attributes:
        pairs: the values that it reads and makes, with their labels; ``None`` for results that nobody reads.
    """

    dimensions: Dimensions
    pairs: tuple[tuple[fx.Node | None, _Labels], ...]


Rows = tuple[int, ...]
"""The dimensions of a value that its rows, or a multiple of them, are the product of, from the outermost on.

Dimensions of one position between these are among them. Others may be between them only inside of a region: rows of
logits ``[B, V, T]`` are dimensions 0 and 2.
"""


def divided_labels(described: Described, where: Mapping[fx.Node, Rows], rows: int) -> tuple[int, ...]:
    """The labels that are divided where an operation is carried out on some rows; none if it has no rows.

    Of the labels of the dimensions that have rows, these are the first ones whose product is a multiple of the rows.
    """
    labels = next(
        (_of_rows(labels, where[value]) for value, labels in described.pairs if value is not None and value in where),
        (),
    )
    product: Any = 1
    for count, label in enumerate(labels, 1):
        product = product * described.dimensions.sizes[label]
        if isinstance(product, int) and product % rows == 0:
            return labels[:count]
    return labels


def tile_sizes(labels: tuple[int, ...], sizes: Mapping[int, Any], rows: int, of_tile: int) -> dict[int, int]:
    """The numbers of positions of a tile along the divided labels: all along the last of them.

    Args:
        sizes: number of positions of the whole, by label.
        rows: the number that the whole has.
        of_tile: the number that the tile has.
    """
    multiple = math.prod(sizes[label] for label in labels) // rows
    return {**dict.fromkeys(labels, 1), labels[-1]: of_tile * multiple} if labels else {}


def described(node: fx.Node) -> Described | None:
    """Describe the dimensions of an operation; ``None``: they are not known."""
    dimensions = dimensions_of(node)
    if dimensions is None:
        return None
    pairs = (
        *zip(operand_nodes(node), dimensions.operands, strict=True),
        *zip(_results(node, dimensions), dimensions.results, strict=True),
    )
    return Described(dimensions=dimensions, pairs=pairs)


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


def rows_among(labels: _Labels, wanted: tuple[int, ...]) -> Rows | Literal[False] | None:
    """The dimensions whose labels begin with ``wanted``, which are divided; those after them are not.

    Returns:
        ``False``: no dimension has any of these labels; ``None``: they are not where they could be divided.
    """
    touched = [dim for dim, labels_of_dim in enumerate(labels) if set(labels_of_dim) & set(wanted)]
    if not touched:
        return False
    rows = tuple(dim for dim in range(touched[0], touched[-1] + 1) if dim in touched or not labels[dim])
    return rows if _of_rows(labels, rows)[: len(wanted)] == wanted else None


def positions_of(node: fx.Node, rows: Rows) -> Any:
    """Number of positions of a value in the dimensions of its rows."""
    shape = node.meta["val"].shape
    return math.prod(shape[dim] for dim in rows)


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
