"""Rows of several positions: tiles of what an operation reads give tiles of what it makes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx

from roundpipe_fx.analysis.dimensions import arguments_on_tile
from roundpipe_fx.analysis.tiling.rows import Rows, described, divided_labels, positions_of, rows_among, tile_sizes
from tests.analysis.dimensions.calls import node_of

aten = torch.ops.aten


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of as many elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=2, max_size=5))

    def grouped() -> list[int]:
        ends = sorted({*draw(st.lists(st.integers(1, len(factors) - 1), max_size=3)), len(factors)})
        return [math.prod(factors[start:end]) for start, end in zip([0, *ends], ends, strict=False)]

    return grouped(), grouped()


def tile(value: torch.Tensor, dims: Rows, rows: int, start: int, count: int) -> torch.Tensor:
    """Some rows of a value, with its number of dimensions."""
    flat = value.flatten(dims[0], dims[-1])
    multiple = flat.shape[dims[0]] // rows
    part = flat.narrow(dims[0], start * multiple, count * multiple)
    return part.unflatten(dims[0], [*[1] * (len(dims) - 1), count * multiple])


def position(node: fx.Node, value: fx.Node, wanted: tuple[int, ...]) -> Rows | bool | None:
    known = described(node)
    assert known is not None
    return next(rows_among(labels, wanted) for other, labels in known.pairs if other is value)


@st.composite
def tiles(draw: st.DrawFn) -> tuple[list[int], list[int], int, int, int]:
    """Two shapes, and some of the rows that the first dimension of the first is divided into."""
    source, result = draw(shapes().filter(lambda both: both[0][0] > 1))
    rows = draw(st.sampled_from([rows for rows in range(2, source[0] + 1) if source[0] % rows == 0]))
    count = draw(st.integers(1, rows - 1))
    return source, result, rows, draw(st.integers(0, rows - count)), count


@settings(deadline=None, derandomize=True, max_examples=300)
@given(drawn=tiles())
@pytest.mark.long
def test_a_view_of_a_tile_is_the_tile_of_the_view(drawn: tuple[list[int], list[int], int, int, int]) -> None:
    source, result, rows, start, count = drawn
    value = torch.arange(math.prod(source)).view(source)
    node = node_of(aten.view.default, value, result)
    (operand,) = node.all_input_nodes
    known = described(node)
    assert known is not None
    labels = divided_labels(known, {operand: (0,)}, rows)
    # The labels that are divided have a multiple of the rows; one fewer has not.
    sizes = [known.dimensions.sizes[label] for label in labels]
    assert math.prod(sizes) % rows == 0 and math.prod(sizes[:-1]) % rows
    assume(not set(labels) & known.dimensions.mixed)
    where = position(node, node, labels)
    assert position(node, operand, labels) == (0,)
    assume(isinstance(where, tuple))
    assert isinstance(where, tuple) and positions_of(node, where) % rows == 0
    of_tile = tile_sizes(labels, known.dimensions.sizes, rows, count)
    args, kwargs = arguments_on_tile(node, known.dimensions, {**known.dimensions.sizes, **of_tile})
    made = aten.view.default(tile(value, (0,), rows, start, count).contiguous(), *args[1:], **kwargs)
    assert torch.equal(made, tile(value.view(result), where, rows, start, count))


@pytest.mark.parametrize(
    ("source", "result", "rows", "expected"),
    [
        ([8, 5], [2, 4, 5], 2, (0,)),  # a row is four positions of one, and one of the other
        ([8, 5], [2, 4, 5], 8, (0, 1)),
        ([8, 5], [2, 4, 5], 4, (0, 1)),  # a row is half of the second dimension
        ([2, 4, 5], [8, 5], 2, (0,)),
        ([8, 5], [40], 8, (0,)),
        ([8, 5], [40], 4, (0,)),
    ],
)
def test_where_rows_of_a_view_are(source: list[int], result: list[int], rows: int, expected: Rows) -> None:
    node = node_of(aten.view.default, torch.zeros(source), result)
    known = described(node)
    assert known is not None
    assert position(node, node, divided_labels(known, {node.all_input_nodes[0]: (0,)}, rows)) == expected


def test_rows_are_not_divided_along_inner_dimensions_alone() -> None:
    """With the second dimension divided, tiles of the result would not be of adjacent positions."""
    node = node_of(aten.view.default, torch.zeros(2, 4, 5), [8, 5])
    known = described(node)
    assert known is not None
    assert position(node, node, divided_labels(known, {node.all_input_nodes[0]: (1,)}, 4)) is None
