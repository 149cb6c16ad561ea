"""Graphs of one model for several shapes are cut at the same operations."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.passes.segments import cut_segments
from roundpipe_fx.pipeline.same_segments import find_like_starts, map_boundaries, segment_starts
from tests import listed
from tests.capturing import capture_joint


class Narrowing(nn.Module):
    """Narrow elsewhere for a few rows than for many: a large value made of parameters alone lives across its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((8, 32), (32, 2), (2, 16), (16, 32), (32, 4)))
        self.table = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = (self.table @ self.table).tanh()
        for layer in self.layers[:3]:
            x = layer(x).tanh()
        x = x @ table
        for layer in self.layers[3:]:
            x = layer(x).tanh()
        return x.square().sum()


def test_another_shape_is_cut_at_the_same_operations() -> None:
    model = Narrowing()
    first, segments = cut_segments(_graph(model, 512))
    starts = segment_starts(first)
    assert len(starts) == len(segments) - 1
    assert len(cut_segments(_graph(model, 8))[1]) != len(segments)
    other = _graph(model, 8)
    other, again = cut_segments(other, only_starts=find_like_starts(other, starts))
    assert len(again) == len(segments) and segment_starts(other) == starts


def test_operations_that_are_not_there_are_said_to_be_missing() -> None:
    assert find_like_starts(_graph(Narrowing(), 2), [("aten.addmm.default", 99)]) is None


def _graph(model: nn.Module, rows: int) -> JointGraph:
    joint, _ = listed.annotated(capture_joint(model, torch.randn(rows, 8)))
    return joint


def test_another_order_has_as_many_segments() -> None:
    graph = _graph(Narrowing(), 8)
    starts = find_like_starts(graph, [("aten.addmm.default", 3), ("aten.mm.default", 0), ("aten.addmm.default", 1)])
    assert starts is not None and len(cut_segments(graph, only_starts=starts)[1]) == 4


def test_boundaries_lie_before_the_same_operations_where_both_graphs_have_them() -> None:
    theirs = [("a", 0), ("b", 0), ("b", 1), ("c", 0)]
    own = [("a", 0), ("b", 0), ("c", 0), ("d", 0), ("d", 1)]
    assert map_boundaries([0, 1, 4], theirs, own) == {0: 0, 1: 1, 4: 3, 5: 6}
    assert map_boundaries([0, 3], theirs, own) == {0: 0, 3: 4, 5: 6}  # in proportion


@given(st.data())
def test_boundaries_divide_the_segments_of_any_graph(data: st.DataObject) -> None:
    keys = st.lists(st.none() | st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=12)
    theirs, own = data.draw(keys), data.draw(keys)
    boundaries = data.draw(st.sets(st.integers(0, len(theirs))))
    found = map_boundaries(boundaries, theirs, own)
    if found is None:
        assert len(boundaries - {0}) > len(own)
        return
    assert found.keys() == {0, *boundaries, len(theirs) + 1}
    places = [found[boundary] for boundary in sorted(found)]
    assert places[0] == 0 and places[-1] == len(own) + 1
    assert all(before < after for before, after in itertools.pairwise(places))
