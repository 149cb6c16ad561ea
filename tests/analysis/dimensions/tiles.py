"""Running an operator tile by tile along a label, and comparing with the whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.dimensions import LOGARITHMS, Dimensions, arguments_on_tile, dimensions_of, operand_nodes
from tests.analysis.dimensions.calls import RealCall, node_of
from tests.analysis.dimensions.samples import DECOMPOSED

__all__ = ["assert_divides", "cuts"]

TOLERANCE = 1e-12


def assert_divides(target: Any, call: RealCall, exact: bool, values: bool = True) -> Dimensions | None:
    """Check all that is claimed of a call: along each label that is not mixed, tiles put together equal the whole.

    Args:
        target: the operator.
        call: its arguments.
        exact: whether the bits are equal.
        values: whether the result has values at all (``empty`` has only a shape).
    """
    node, run = node_of(target, *call.args, **call.kwargs), DECOMPOSED.get(target, target)
    dimensions = dimensions_of(node)
    if dimensions is None:
        return None
    inputs = [node for node in node.graph.nodes if node.op == "placeholder"]
    tensors = [t for t in _leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
    reals = dict(zip(inputs, tensors, strict=True))
    operands = [reals[operand] for operand in operand_nodes(node)]
    whole = _tensors(run(*call.args, **call.kwargs))
    assert_shapes(dimensions, operands, whole)
    for label, size in dimensions.sizes.items():
        if label in dimensions.mixed:
            continue
        for lengths in cuts(int(size)):
            parts = []
            for start, length in zip(itertools.accumulate([0, *lengths]), lengths, strict=False):
                tiles = {
                    operand: cut(reals[operand], dims, label, start, length, dimensions.sizes)
                    for operand, dims in zip(operand_nodes(node), dimensions.operands, strict=True)
                }
                arguments = arguments_on_tile(node, dimensions, {label: length})
                args, kwargs = fx.node.map_arg(arguments, tiles.__getitem__)
                parts.append(_tensors(run(*args, **kwargs)))
            for place, (expected, dims) in enumerate(zip(whole, dimensions.results, strict=True)):
                tiled = [part[place] for part in parts]
                found = put_together(target, tiled, dims, label, lengths, dimensions.sizes)
                assert found.dtype == expected.dtype
                assert found.shape == expected.shape, f"{target}: label {label} of {dimensions}"
                if not values:
                    continue
                assert _close(found, expected, exact), f"{target}: label {label} of {dimensions}, tiles {lengths}"
    return dimensions


def assert_shapes(dimensions: Dimensions, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    described = (*dimensions.operands, *dimensions.results)
    for tensor, dims in zip((*operands, *results), described, strict=True):
        sizes = [torch.Size([dimensions.sizes[label] for label in dim]).numel() for dim in dims]
        assert sizes == list(tensor.shape)


def _close(found: torch.Tensor, expected: torch.Tensor, exact: bool) -> bool:
    if exact or not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(torch.nan_to_num(found), torch.nan_to_num(expected)) and torch.equal(
            found.isnan(), expected.isnan()
        )
    return torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def cuts(size: int) -> list[list[int]]:
    """The whole, and two and three uneven parts."""
    found = [[size]]
    if size >= 2:
        found.append([1, size - 1])
    if size >= 4:
        found.append([size - 3, 1, 2])
    return found


def cut(
    tensor: torch.Tensor, dims: Sequence[Sequence[int]], label: int, start: int, length: int, sizes: Any
) -> torch.Tensor:
    for place, dim in enumerate(dims):
        if label in dim:
            parts = tensor.unflatten(place, [sizes[part] for part in dim])
            tile = parts.narrow(place + list(dim).index(label), start, length)
            return tile.flatten(place, place + len(dim) - 1).contiguous()
    return tensor


def put_together(
    target: Any,
    tiles: Sequence[torch.Tensor],
    dims: Sequence[Sequence[int]],
    label: int,
    lengths: Sequence[int],
    sizes: Any,
) -> torch.Tensor:
    for place, dim in enumerate(dims):
        if label in dim:
            inner = place + list(dim).index(label)
            parts = [
                tile.unflatten(place, [length if part == label else sizes[part] for part in dim])
                for tile, length in zip(tiles, lengths, strict=True)
            ]
            return torch.cat(parts, inner).flatten(place, place + len(dim) - 1)
    total = tiles[0]
    for tile in tiles[1:]:
        total = torch.logaddexp(total, tile) if target in LOGARITHMS else total + tile
    return total


def _leaves(value: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]
