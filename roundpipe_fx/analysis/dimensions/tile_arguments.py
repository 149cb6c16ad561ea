"""The arguments of an operation for a run on a tile: constants that are sizes become those of the tile."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.dimensions.labels import Dim, Dimensions
from roundpipe_fx.analysis.dimensions.operands import arguments, operand_nodes

aten = torch.ops.aten

Sizes = Mapping[int, Any]
"""Numbers of positions by label: numbers or nodes."""

SHAPE_ARGUMENTS: dict[Any, str] = {
    aten.view.default: "size",
    aten._unsafe_view.default: "size",
    aten.reshape.default: "shape",
    aten.expand.default: "size",
    aten.full.default: "size",
    aten.zeros.default: "size",
    aten.ones.default: "size",
    aten.empty.memory_format: "size",
    aten.new_zeros.default: "size",
    aten.new_ones.default: "size",
    aten.new_full.default: "size",
    aten.new_empty.default: "size",
    aten.slice_backward.default: "input_sizes",
    aten.select_backward.default: "input_sizes",
    aten.upsample_nearest2d_backward.default: "input_size",
    aten._upsample_nearest_exact2d_backward.default: "input_size",
    aten.upsample_bilinear2d_backward.default: "input_size",
    aten.upsample_bicubic2d_backward.default: "input_size",
}
"""The argument that is the shape of the result."""


def arguments_on_tile(
    node: fx.Node, dimensions: Dimensions, sizes: Mapping[int, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operation for a run on a tile.

    Args:
        dimensions: what is known of it.
        sizes: the tile's number of positions by label, as numbers or as nodes; labels that are left out are not
            divided. If a dimension is a product of several labels of which one is a node, products are added to that
            node's graph, where it inserts.

    Returns:
        Positional and keyword arguments: those of the node, but for constants that are sizes along the given labels.
        Tensors are the node's; the caller replaces them by tiles.
    """
    changed = _changed(node, dimensions, sizes)
    whole = arguments(node)
    # Only what differs is replaced: expressions of the node stay, and no multiplication is added to the graph for them.
    changed = {name: value for name, value in changed.items() if value is not None and value != whole[name]}
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    args = tuple(changed.get(name, value) for name, value in zip(names, node.args, strict=False))
    kwargs = {name: changed.get(name, value) for name, value in node.kwargs.items()}
    return args, kwargs


def _changed(node: fx.Node, dimensions: Dimensions, sizes: Sizes) -> dict[str, Any]:
    """Arguments on a tile that are sizes, by name."""
    whole = arguments(node)
    name = SHAPE_ARGUMENTS.get(node.target)
    if name is not None:
        return {name: _shape(whole[name], dimensions.results[0], dimensions, sizes)}
    special = SPECIAL.get(node.target)
    return special(node, whole, dimensions, sizes) if special is not None else {}


def _shape(shape: Sequence[Any], dims: Sequence[Dim], dimensions: Dimensions, sizes: Sizes) -> list[Any]:
    return [_size(size, dim, dimensions, sizes) for size, dim in zip(shape, dims, strict=True)]


def _size(size: Any, dim: Dim, dimensions: Dimensions, sizes: Sizes) -> Any:
    """The size of a dimension on a tile; as given where it is not divided."""
    # No label of this dimension is divided: the whole size, also where it is an expression.
    if not any(label in sizes for label in dim):
        return size
    return functools.reduce(_product, (sizes.get(label, dimensions.sizes[label]) for label in dim))


def _product(one: Any, other: Any) -> Any:
    """A product, as a node if one of them is a node."""
    # One of the factors may be a node (a symbolic size): the product is then a node, too.
    for node in (one, other):
        if isinstance(node, fx.Node):
            made = node.graph.call_function(operator.mul, (one, other))
            values = [item.meta.get("val") if isinstance(item, fx.Node) else item for item in (one, other)]
            if not any(value is None for value in values):
                made.meta["val"] = operator.mul(*values)
            return made
    return one * other


def _of(node: fx.Node, name: str, dimensions: Dimensions) -> Sequence[Dim]:
    """The dimensions of a tensor operand."""
    return dimensions.operands[operand_nodes(node).index(arguments(node)[name])]


def _repeats(node: fx.Node, arguments: Mapping[str, Any], dimensions: Dimensions, sizes: Sizes) -> dict[str, Any]:
    labels = {label for dim in _of(node, "self", dimensions) for label in dim}
    # ``repeat`` puts its own labels before those of the operand: what is left of each dimension without the operand's
    # is how often the tile is repeated.
    times = [tuple(label for label in dim if label not in labels) for dim in dimensions.results[0]]
    return {"repeats": _shape(arguments["repeats"], times, dimensions, sizes)}


def _batch(node: fx.Node, arguments: Mapping[str, Any], dimensions: Dimensions, sizes: Sizes) -> dict[str, Any]:
    return {"N": _size(arguments["N"], _of(node, "input", dimensions)[0], dimensions, sizes)}


def _bias_sizes(node: fx.Node, arguments: Mapping[str, Any], dimensions: Dimensions, sizes: Sizes) -> dict[str, Any]:
    if arguments["bias_sizes"] is None:
        return {}
    channels = _of(node, "grad_output", dimensions)[1]
    return {"bias_sizes": _shape(arguments["bias_sizes"], [channels], dimensions, sizes)}


Special = Callable[[fx.Node, Mapping[str, Any], Dimensions, Sizes], dict[str, Any]]

SPECIAL: dict[Any, Special] = {
    aten.repeat.default: _repeats,
    aten.native_group_norm.default: _batch,
    aten.native_group_norm_backward.default: _batch,
    aten.convolution_backward.default: _bias_sizes,
}
"""Operators with other arguments that are sizes."""
