"""Plans for one limit: better than what is spread over all of them, and in order from limit to limit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import SearchResult, refine, search
from roundpipe_fx.remat.choose import choose, write_refusal
from tests.remat.graphs import mlp, operations_of

GRAPH = operations_of(mlp(depth=12), torch.randn(512, 16))


@pytest.mark.long
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
    assert not choose(GRAPH, found.candidates[-1].peak.bytes - 1).fits


def test_below_the_lowest_peak_the_solutions_for_the_least_memory_are_tried() -> None:
    blocks = Blocks(GRAPH)
    found = search(blocks)
    lowest = found.candidates[-1]
    partial = SearchResult(found.candidates[:-2], found.points)
    within = found.candidates[-2].peak.bytes - 1
    assert min(item.peak.bytes for item in partial.candidates) > within
    assert refine(blocks, partial, within)[-1].peak.bytes == lowest.peak.bytes


def test_what_programs_need_beyond_what_was_simulated_counts_for_those_that_need_it() -> None:
    lowest = choose(GRAPH, 0.0)
    limit, item = lowest.limit, lowest.candidate
    assert choose(GRAPH, limit + 100, margin=100).candidate.peak.bytes == limit
    # What others need beyond does not refuse a plan whose own programs are not known.
    assert choose(GRAPH, limit + 99, margin=100).fits
    assert not choose(GRAPH, limit + 99, margin=100, emitted=[(item, limit + 100)]).fits
    assert choose(GRAPH, limit + 100, margin=200, emitted=[(item, limit + 100)]).fits
    assert f"at least {limit + 100} bytes" in write_refusal(choose(GRAPH, limit - 1), limit + 100, limit - 1)
