from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.segment import Segment
from roundpipe_fx.passes.stages import cut_stages

LINK = 1e-3  # seconds a byte


def _empty_joint() -> JointGraph:
    graph = fx.Graph()
    graph.output(())
    return JointGraph(fx.GraphModule(torch.nn.Module(), graph), 0)


def _transfer(size: int) -> float:
    return size * LINK


def _chain(costs: list[float], sizes: list[int]) -> list[Segment]:
    return [
        Segment(i, cost / 3, cost * 2 / 3, size if i else 0, str(i))
        for i, (cost, size) in enumerate(zip(costs, sizes, strict=True))
    ]


def _objective(segments: list[Segment], starts: tuple[int, ...]) -> tuple[float, int]:
    ends = (*starts[1:], len(segments))
    stages = [segments[start:end] for start, end in zip(starts, ends, strict=True)]
    slowest = max(sum(s.seconds for s in stage) + 2 * _transfer(stage[0].entry_bytes) for stage in stages)
    return slowest, sum(segments[start].entry_bytes for start in starts[1:])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_optimum_is_that_of_exhaustive_search(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    costs = data.draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    sizes = data.draw(st.lists(st.integers(0, 5000), min_size=count, max_size=count))
    stages = data.draw(st.integers(1, count))
    segments = _chain([float(cost) for cost in costs], sizes)
    _, cuts = cut_stages(_empty_joint(), segments, stages, _transfer)
    found = _objective(segments, tuple(cut.first for cut in cuts))
    best = min(_objective(segments, (0, *rest)) for rest in itertools.combinations(range(1, count), stages - 1))
    assert found[0] == pytest.approx(best[0], rel=1e-12)
    ties = [
        value
        for rest in itertools.combinations(range(1, count), stages - 1)
        if (value := _objective(segments, (0, *rest)))[0] <= best[0] * (1 + 1e-12)
    ]
    assert found[1] == min(value[1] for value in ties)
    assert [cut.first for cut in cuts[1:]] == [cut.last + 1 for cut in cuts[:-1]] and cuts[-1].last == count - 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_auto_is_the_fewest_within_a_tenth_of_the_heaviest(costs: list[int]) -> None:
    segments = _chain([float(cost) for cost in costs], [0] * len(costs))
    _, cuts = cut_stages(_empty_joint(), segments, "auto", _transfer)
    limit = 1.1 * max(costs)
    assert _objective(segments, tuple(cut.first for cut in cuts))[0] <= limit * (1 + 1e-9)
    for fewer in range(1, len(cuts)):
        for rest in itertools.combinations(range(1, len(costs)), fewer - 1):
            assert _objective(segments, (0, *rest))[0] > limit


def test_too_many_stages_are_clamped() -> None:
    with pytest.warns(UserWarning, match="stages=9 is more than the 3 segments"):
        _, cuts = cut_stages(_empty_joint(), _chain([1.0] * 3, [1] * 3), 9, _transfer)
    assert len(cuts) == 3
