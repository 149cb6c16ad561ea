from __future__ import annotations

import itertools
from collections.abc import Sequence

import expecttest
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.segment import Segment
from roundpipe_fx.passes.stages import cut_stages, stages_of_starts, starts_between_repeats
from tests.graph_text import after

LINK = 1e-3  # seconds a byte


def _empty_joint() -> JointGraph:
    graph = fx.Graph()
    graph.output(())
    return JointGraph(module=fx.GraphModule(torch.nn.Module(), graph), num_forward_outputs=0)


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


@pytest.mark.parametrize(
    ("names", "stages"),
    [
        ("abcbcbcde", "a bc bc bc de"),
        ("abcdcdcdef", "ab cd cd cd ef"),
        ("abbbbbc", "a b b b b b c"),
        ("abcdefgh", "abcdefgh"),
        ("aaaa", "a a a a"),
        # One of fifteen occurs twice: to compile it twice is less than a tenth more.
        ("abcdefghijklmbn", "abcdefghijklmbn"),
        ("abcabc", "abc abc"),
        # One of four occurs twice, and each end of a stage costs as much as some nodes do.
        ("abcdb", "abcdb"),
    ],
)
def test_what_repeats_is_a_stage_and_what_does_not_is_part_of_one(names: str, stages: str) -> None:
    size = 10 if names == "abcdb" else 500
    assert _with_starts(names, starts_between_repeats(names, [size] * len(names))) == stages


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 90)), min_size=1, max_size=9))
def test_fewest_stages_compile_at_most_a_tenth_more_than_segments_would(segments: list[tuple[str, int]]) -> None:
    sizes_of = dict(segments)
    names = "".join(name for name, _ in segments)

    def compiled(starts: tuple[int, ...]) -> int:
        distinct = set(_with_starts(names, starts).split())
        return sum(sizes_of[name] for stage in distinct for name in stage) + 5 * len(distinct)

    starts = tuple(starts_between_repeats(names, [sizes_of[name] for name in names]))
    assert compiled(starts) <= 1.1 * compiled(tuple(range(len(names))))
    # No two neighbours could still be joined for a tenth more than the best stages need.
    cuts = range(1, len(names))
    least = min(compiled((0, *chosen)) for size in range(len(names)) for chosen in itertools.combinations(cuts, size))
    for cut in range(1, len(starts)):
        assert compiled((*starts[:cut], *starts[cut + 1 :])) > 1.1 * least


def _with_starts(names: str, starts: Sequence[int]) -> str:
    ends = [*starts[1:], len(names)]
    return " ".join(names[start:end] for start, end in zip(starts, ends, strict=True))


def test_as_text_each_segment_a_stage() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # forward, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # forward, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward, segment 1
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t: float32[8, 4] = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    t_1: float32[8, 8] = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # backward, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4] = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
"""
    made = after(stages_of_starts, before, [0, 1], 2, name="stages")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # forward, stage 1, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward, stage 1, segment 1
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t: float32[8, 4].strides(1, 8) = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    t_1: float32[8, 8].strides(1, 8) = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # backward, stage 0, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4].strides(1, 8) = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
""",
    )


def test_as_text_all_segments_one_stage() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # forward, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # forward, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward, segment 1
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t: float32[8, 4] = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    t_1: float32[8, 8] = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # backward, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4] = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
"""
    made = after(stages_of_starts, before, [0], 2, name="stages")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # forward, stage 0, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward, stage 0, segment 1
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t: float32[8, 4].strides(1, 8) = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    t_1: float32[8, 8].strides(1, 8) = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # backward, stage 0, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4].strides(1, 8) = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
""",
    )
