"""What is kept counts for each microbatch in flight."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain import ChainStage, ChainStageOption, SegmentChain
from roundpipe_fx.remat.chain_search import make_schedule_of_choice
from roundpipe_fx.remat.in_flight import SegmentRun, find_points_of_run, merge_choices
from roundpipe_fx.remat.schedule import PlannedOp, PlannedSchedule
from roundpipe_fx.remat.segment_chain import chain_of
from roundpipe_fx.remat.solve_chain import solve_chain
from tests.remat.graphs import mlp, operations_of

numbers = st.integers(0, 4)
options = st.builds(
    ChainStageOption, held=st.integers(1, 5), seconds=st.integers(0, 5), forward=numbers, backward=numbers
)
stages = st.lists(st.lists(options, min_size=1, max_size=3), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(stages, st.integers(1, 4), st.integers(0, 3))
def test_optimum_of_what_each_link_keeps(kept: list[list[ChainStageOption]], in_flight: int, price: int) -> None:
    chain = SegmentChain(
        tuple(ChainStage(seconds=1.0, forward=0, options=tuple(own), unsaved_options=()) for own in kept),
        np.zeros((len(kept), len(kept)), np.int64),
        times=in_flight,
        price=price,
    )
    limit = in_flight * sum(max(option.held for option in own) for own in kept) + 8
    solution = solve_chain(chain, limit, limit, nested=False)
    for memory in range(limit + 1):
        best = np.inf
        for chosen in itertools.product(*kept):
            held = 0
            fits = True
            for option in chosen:
                held += in_flight * option.held
                # The others' are there too while a stage runs; its own is part of what it needs.
                running = max(option.forward, option.backward)
                fits &= held - option.held + running <= memory
            if fits:
                best = min(best, sum(option.seconds + price * option.held for option in chosen))
        assert solution.seconds[memory] == best, memory


def test_nothing_need_be_kept_of_the_last_link() -> None:
    def chain(in_flight: int) -> SegmentChain:
        stage = ChainStage(
            seconds=2.0,
            forward=1,
            options=(ChainStageOption(3, 0.0, 3, 3),),
            unsaved_options=(ChainStageOption(0, 2.0, 3, 3),),
        )
        return SegmentChain((stage, stage), np.array([[0, 1], [0, 0]]), times=in_flight, alone=in_flight == 1)

    alone, several = (solve_chain(chain(in_flight), 40, 40) for in_flight in (1, 5))
    assert alone.seconds[6] == 0 and np.isinf(alone.seconds[3])
    assert several.seconds[30] == 0
    assert several.seconds[18] == 2, "one stage's values are saved five times, of the other nothing"
    assert several.seconds[8] == 4, "of both what enters them"
    assert several.seconds[4] == 6 and np.isinf(several.seconds[3]), "what enters the first alone"
    decisions = several.decisions(4)
    assert [decision.until for decision in decisions] == [2, 1, 1, 0]
    assert several.chain.needed(decisions) == 4 and sum(map(several.chain.bytes_kept, decisions)) == 0


def test_the_more_are_in_flight_the_less_is_kept() -> None:
    graph = operations_of(mlp(), torch.randn(64, 16))
    chain, save_options = chain_of(Blocks(graph))
    for first, end in ((0, graph.segments), (1, graph.segments)):
        least = []
        for in_flight in (1, 8):
            points = find_points_of_run(graph, chain, save_options, SegmentRun(first, end, frozenset([0]), in_flight))
            seconds = [point.seconds for point in points]
            assert seconds == sorted(seconds) and seconds[0] == 0 < seconds[-1]
            choice = points[-1].choice()
            assert all(first <= graph.segment_of[storage] < end for storage in choice.kept)
            assert all(first <= segment < end for segment in (*choice.held, *choice.remat_level))
            least.append(sum(graph.sizes[storage] for storage in choice.kept))
        assert least[1] < least[0]


def test_choices_of_parts_are_one_choice() -> None:
    graph = operations_of(mlp(), torch.randn(64, 16))
    blocks = Blocks(graph)
    chain, save_options = chain_of(blocks)
    middle = graph.segments // 2
    runs = [SegmentRun(0, middle, frozenset([0]), 4), SegmentRun(middle, graph.segments, frozenset([1]), 2)]
    ladders = [find_points_of_run(graph, chain, save_options, run) for run in runs]
    recomputing = make_schedule_of_choice(blocks, merge_choices([ladders[0][-1].choice(), ladders[1][0].choice()]))
    assert all(graph.segment_of[step.operation.makes[0]] < middle for step in _again(recomputing.schedule)), (
        "only one recomputes per use"
    )
    assert (
        0
        < recomputing.seconds
        < make_schedule_of_choice(blocks, merge_choices([own[-1].choice() for own in ladders])).seconds
    )


def _again(schedule: PlannedSchedule) -> list[PlannedOp]:
    return [step for _, steps in schedule.backward for step in steps if step.recipe is not None]
