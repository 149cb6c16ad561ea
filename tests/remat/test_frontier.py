"""The minimum cut against all subsets."""

from __future__ import annotations

import itertools

import pytest
import torch

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.remat.frontier import frontier
from roundpipe_fx.remat.schedule import recompute_just_in_time
from tests.golden_models import MixtureOfExperts
from tests.remat.graphs import mlp, operations_of


def _segment(graph: OperationGraph, segment: int) -> tuple[list[int], frozenset[int]]:
    needed = dict.fromkeys(s for operation in graph.backward[segment] for s in operation.reads)
    return list(needed), graph.always_live | {s for s in graph.makers if graph.segment_of[s] < segment}


@pytest.mark.parametrize("segment", [1, 2])
def test_no_subset_is_better_than_the_hull(segment: int) -> None:
    graph = operations_of(mlp(), torch.randn(8, 16))
    needed, available = _segment(graph, segment)
    found = frontier(graph, needed, available, {}, most=50)
    assert len(found) > 2
    own = [s for s in graph.makers if graph.segment_of[s] == segment and s not in available]
    assert len(own) <= 14
    points = []
    for count in range(len(own) + 1):
        for saved in itertools.combinations(own, count):
            steps = recompute_just_in_time(graph, segment, available | set(saved))
            used = {s for step in steps for s in step.reads} & set(saved)
            points.append((sum(graph.sizes[s] for s in used), sum(step.seconds for step in steps)))
    for high, low in itertools.pairwise(found):
        assert high.bytes > low.bytes and high.seconds < low.seconds
        price = (high.bytes - low.bytes) / (low.seconds - high.seconds)
        line = high.bytes + price * high.seconds
        # Whole slots of the flow's capacities are the only rounding.
        assert min(size + price * seconds for size, seconds in points) >= line * (1 - 1e-6)
    assert found[0].seconds == 0.0
    assert found[-1].bytes <= min(size for size, _ in points)


def test_what_a_vertex_says_is_what_its_backward_costs() -> None:
    graph = operations_of(mlp(), torch.randn(8, 16))
    for segment in range(graph.segments):
        needed, available = _segment(graph, segment)
        for saving in frontier(graph, needed, available, {}):
            steps = recompute_just_in_time(graph, segment, available | saving.saved)
            found = sum(step.seconds for step in steps)
            if any(step.operation.node.target is torch.ops.aten.native_dropout.default for step in steps):
                assert found <= saving.seconds * (1 + 1e-9)  # one drawing may give both the values and the mask
            else:
                assert found == pytest.approx(saving.seconds)
            assert saving.bytes == sum(graph.sizes[s] for s in saving.saved)


def test_segments_that_are_alike_are_solved_once() -> None:
    graph = operations_of(mlp(depth=6), torch.randn(8, 16))
    known: dict = {}
    for segment in range(graph.segments):
        frontier(graph, *_segment(graph, segment), known)
    assert len(known) < graph.segments


def test_hoisted_values_are_never_made_again() -> None:
    graph = operations_of(MixtureOfExperts(), torch.randn(6, 8))
    assert graph.must_save
    for segment in range(graph.segments):
        needed, available = _segment(graph, segment)
        for saving in frontier(graph, needed, available, {}):
            steps = recompute_just_in_time(graph, segment, available | saving.saved)
            for step in steps:
                assert step.recipe is None or graph.must_save.isdisjoint(step.makes)
