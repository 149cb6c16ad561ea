"""What is known of sizes is kept beside PyTorch's objects, not on them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from roundpipe_fx.torch_private import assume_sizes, assumed_sizes, note_count, size_hint


def _graph_of(value: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.placeholder("x").meta["val"] = value
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)


def _nonzero(rows: int) -> torch.Tensor:
    """A value with as many rows as a mask has elements set; its graph is its own."""
    with FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True)):
        return torch.nonzero(torch.empty(rows, 3))


def test_a_count_is_at_most_the_elements_of_what_is_counted() -> None:
    shape_env = ShapeEnv()
    count, rows = shape_env.create_unbacked_symint(), shape_env.create_unbacked_symint()
    note_count(count, [rows, 3])
    note_count(rows, [7])
    assert size_hint(count) == 21
    assert size_hint(count * 2 + 1) == 43


def test_sizes_assumed_are_those_of_their_graph() -> None:
    value, other = _nonzero(5), _nonzero(5)
    symbol = str(value.shape[0])
    assume_sizes(_graph_of(value), {symbol: 4})
    assert assumed_sizes(_graph_of(value)) == {symbol: 4}
    assert assumed_sizes(_graph_of(other)) == {}
    assert size_hint(value.shape[0]) == 4
    assert size_hint(other.shape[0]) == 15


def test_a_bound_that_becomes_known_later_is_planned_with() -> None:
    shape_env = ShapeEnv()
    count, unbounded = shape_env.create_unbacked_symint(), shape_env.create_unbacked_symint()
    graph = _graph_of(count)
    assume_sizes(graph, {str(count): 4, str(unbounded): 5}, at_most=True)
    assert size_hint(count) == 4
    note_count(count, [7, 3])  # as a pass does that makes a mask's `nonzero` explicit
    assert (size_hint(count), size_hint(unbounded)) == (21, 5)
    assert assumed_sizes(graph) == {str(count): 21, str(unbounded): 5}
    assume_sizes(graph, {str(count): 4})
    assert size_hint(count) == 4


@pytest.mark.long
def test_nothing_is_left_on_the_shape_env_nor_after_it() -> None:
    shape_env = ShapeEnv()
    before = set(vars(shape_env))
    count, rows = shape_env.create_unbacked_symint(), shape_env.create_unbacked_symint()
    note_count(count, [rows, 3])
    assume_sizes(_graph_of(count), {str(rows): 4})
    assert size_hint(count) == 12
    assert set(vars(shape_env)) == before
    gone = weakref.ref(shape_env)
    del shape_env, count, rows
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):  # PyTorch's own caches keep a ShapeEnv
            method.cache_clear()
    gc.collect()
    assert gone() is None
