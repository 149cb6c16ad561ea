"""Plans for one limit: better than what is spread over all of them, and in order from limit to limit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.budget import InfeasibleBudgetError
from roundpipe_fx.planner.blocks import Blocks
from roundpipe_fx.planner.choose import choose
from roundpipe_fx.planner.search import refine, search
from tests.planner.graphs import mlp, operations_of

GRAPH = operations_of(mlp(depth=12), torch.randn(512, 16))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_with_less_memory_peaks_never_rise_and_seconds_never_fall(shares: list[float]) -> None:
    found = [choose(GRAPH, share) for share in sorted(shares)]
    assert all(item.candidate.peak.bytes <= item.limit for item in found)
    for less, more in itertools.pairwise(found):
        assert less.candidate.peak.bytes <= more.candidate.peak.bytes
        assert less.candidate.seconds >= more.candidate.seconds


def test_less_is_recomputed_than_by_what_is_spread_over_all_limits() -> None:
    blocks = Blocks(GRAPH)
    found = search(blocks)
    above, below = found.candidates[1], found.candidates[2]
    limit = (above.peak.bytes + below.peak.bytes) // 2
    candidates = refine(blocks, found, limit)
    best = next(item for item in candidates if item.peak.bytes <= limit)
    assert below.peak.bytes < best.peak.bytes <= limit and above.seconds < best.seconds < below.seconds
    assert [item.peak.bytes for item in candidates] == sorted((c.peak.bytes for c in candidates), reverse=True)
    assert set(map(id, found.candidates)) <= set(map(id, candidates))


def test_the_ends_are_not_refined() -> None:
    blocks = Blocks(GRAPH)
    found = search(blocks)
    assert refine(blocks, found, found.candidates[0].peak.bytes) == found.candidates
    assert refine(blocks, found, found.candidates[-1].peak.bytes - 1) == found.candidates
    with pytest.raises(InfeasibleBudgetError):
        choose(GRAPH, found.candidates[-1].peak.bytes - 1)


def test_what_programs_need_beyond_what_was_simulated_is_part_of_the_least_budget() -> None:
    lowest = choose(GRAPH, 0.0).limit
    assert choose(GRAPH, lowest + 100, margin=100).candidate.peak.bytes == lowest
    with pytest.raises(InfeasibleBudgetError, match=f"at least {lowest + 100} bytes") as caught:
        choose(GRAPH, lowest + 99, margin=100)
    assert caught.value.minimum == lowest + 100
