"""Segments with the options of several copies, against all choices by exhaustion."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.remat.chain import ChainStage, ChainStageOption, SegmentChain
from roundpipe_fx.remat.options_in_tiles import ChainInTiles, join_chains, solve_joined

LIMIT = 1000
"""One byte is a slot then: nothing is rounded."""


def option_strategy() -> st.SearchStrategy[ChainStageOption]:
    sizes = st.integers(0, 400)
    return st.builds(ChainStageOption, sizes, st.integers(0, 30).map(float), sizes, sizes)


@st.composite
def copies_strategy(draw: st.DrawFn) -> list[ChainInTiles]:
    segments = draw(st.integers(1, 3))
    copies = []
    for _ in range(draw(st.integers(1, 3))):
        stages = [
            ChainStage(
                seconds=1.0,
                forward=0,
                options=tuple(draw(st.lists(option_strategy(), min_size=1, max_size=2))),
                unsaved_options=(),
                resident=draw(st.integers(0, 50)),
                resident_forward=draw(st.integers(0, 50)),
            )
            for _ in range(segments)
        ]
        seconds = tuple(float(draw(st.integers(10, 40))) for _ in range(segments))
        copies.append(ChainInTiles(SegmentChain(tuple(stages), np.zeros((segments, segments), np.int64)), seconds))
    return copies


def all_choices(copies: Sequence[ChainInTiles]) -> Iterator[tuple[tuple[int, ...], int, float]]:
    """By segment, the copy; the bytes that are needed; and the seconds beyond those of the first copy."""
    segments = range(len(copies[0].seconds))
    each = [
        [(number, option) for number, copy in enumerate(copies) for option in copy.chain.stages[segment].options]
        for segment in segments
    ]
    for choice in itertools.product(*each):
        held, needed, seconds = 0, 0, 0.0
        for segment, (number, option) in enumerate(choice):
            stage = copies[number].chain.stages[segment]
            running = max(option.forward + stage.resident_forward, option.backward + stage.resident)
            needed = max(needed, held + running)
            held += option.held
            seconds += option.seconds + copies[number].seconds[segment] - copies[0].seconds[segment]
        yield tuple(number for number, _ in choice), needed, seconds


@settings(max_examples=60, deadline=None)
@given(copies_strategy())
def test_the_best_of_all_copies_is_found(copies: list[ChainInTiles]) -> None:
    every = list(all_choices(copies))
    found = list(solve_joined(join_chains(copies), LIMIT))
    within = [seconds for _, needed, seconds in every if needed <= LIMIT * 1.1]
    assert bool(found) == bool(within)
    if found:
        assert found[0][0] == min(within)
    for seconds, numbers in found:
        alike = [(needed, own) for choice, needed, own in every if choice == numbers]
        assert (seconds, True) in [(own, needed <= LIMIT * 1.1) for needed, own in alike]
        least = min(needed for needed, own in alike if own == seconds)
        assert seconds == min(own for _, needed, own in every if needed <= least)


@settings(max_examples=60, deadline=None)
@given(copies_strategy())
def test_each_next_one_takes_longer_and_other_copies(copies: list[ChainInTiles]) -> None:
    found = list(solve_joined(join_chains(copies), LIMIT))
    assert [seconds for seconds, _ in found] == sorted({seconds for seconds, _ in found})
    assert len({numbers for _, numbers in found}) == len(found)


def test_options_that_another_copy_dominates_are_left_out() -> None:
    def copy(seconds: float, *options: ChainStageOption) -> ChainInTiles:
        stage = ChainStage(seconds=1.0, forward=0, options=options, unsaved_options=())
        return ChainInTiles(SegmentChain((stage,), np.zeros((1, 1), np.int64)), (seconds,))

    whole = copy(10.0, ChainStageOption(8, 0.0, 9, 9), ChainStageOption(2, 4.0, 9, 9))
    tiled = copy(11.0, ChainStageOption(2, 0.0, 5, 5), ChainStageOption(8, 0.5, 9, 9))
    joined = join_chains([whole, tiled])
    assert joined.copies == ((0, 1),)
    assert joined.chain.stages[0].options == (ChainStageOption(8, 0.0, 9, 9), ChainStageOption(2, 1.0, 5, 5))
