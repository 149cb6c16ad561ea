"""Early recomputation: needs no incoming gradient, and costs no memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.analysis.read_operations import read_operations
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import search
from roundpipe_fx.remat.early import find_early_choices, move_early, move_early_within_peak
from roundpipe_fx.remat.schedule import PlannedOp, PlannedSchedule, simulate
from tests.remat.graphs import mlp, staged


@pytest.fixture(scope="module")
def found() -> tuple[OperationGraph, PlannedSchedule]:
    graph = read_operations(*staged(mlp(depth=6), torch.randn(512, 16), stages=3))
    candidates = search(Blocks(graph)).candidates
    return graph, candidates[len(candidates) // 2].schedule


def _steps(schedule: PlannedSchedule) -> list[PlannedOp]:
    return [step for _, block in schedule.backward for step in block]


def _early(schedule: PlannedSchedule) -> set[int]:
    return {position for position, step in enumerate(_steps(schedule)) if step.early}


def test_choices_grow_and_need_no_gradient(found: tuple[OperationGraph, PlannedSchedule]) -> None:
    graph, schedule = found
    choices = find_early_choices(graph, schedule)
    assert set(choices) == {0, 1, 2} and any(len(own) > 1 for own in choices.values())
    for own in choices.values():
        assert own[0] == frozenset()
        assert all(smaller < larger for smaller, larger in itertools.pairwise(own))
    most = move_early(schedule, choices, {stage: len(own) - 1 for stage, own in choices.items()})
    available = set(graph.makers)
    for step in _steps(most):
        if step.early:
            assert step.rng_shape_source is None and available.issuperset(step.reads)
            available.update(step.makes)
        elif step.recipe is not None:  # what is recomputed just in time is nothing that early steps read
            available.difference_update(step.makes)


def test_what_is_early_does_not_raise_the_peak(found: tuple[OperationGraph, PlannedSchedule]) -> None:
    graph, schedule = found
    peak = simulate(graph, schedule).bytes
    free, beside = move_early_within_peak(graph, schedule, ()), move_early_within_peak(graph, schedule, (0, 1, 2))
    assert _early(free) and _early(free) <= _early(beside)
    assert simulate(graph, free).bytes == simulate(graph, beside).bytes == peak
    assert free.seconds == beside.seconds == schedule.seconds


def test_what_only_gradients_of_parameters_need_is_not_early(found: tuple[OperationGraph, PlannedSchedule]) -> None:
    graph, schedule = found
    whole, split = find_early_choices(graph, schedule), find_early_choices(graph, schedule, split=True)
    for stage, own in split.items():
        assert own[-1] <= whole[stage][-1]
    for stage, own in split.items():
        for position in own[-1]:
            readers = [s for s in _steps(schedule)[position:] if set(s.reads) & set(_steps(schedule)[position].makes)]
            assert readers, (stage, position)


def test_nothing_recomputed_is_nothing_early() -> None:
    graph = read_operations(*staged(mlp(depth=2), torch.randn(64, 16), stages=2))
    kept = search(Blocks(graph)).candidates[0].schedule
    assert kept.seconds == 0
    assert move_early_within_peak(graph, kept, (0, 1)) is kept
