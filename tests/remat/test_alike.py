"""Segments that are alike: what is worked out for one holds for the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_fx.analysis.read_operations import read_operations
from roundpipe_fx.remat.alike import backward_key
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.reduce_peak import MAX_REMAT_LEVEL
from tests.remat.graphs import mlp, operations_of, staged
from tests.remat.test_save_policy import RandomModel, operations, relaxed


@pytest.mark.long
@relaxed
@given(st.data(), operations, st.integers(1, 3))
def test_costs_are_those_of_the_segments_own_blocks(data: st.DataObject, chain: list, stages: int) -> None:
    torch.manual_seed(0)
    joint, segments = staged(RandomModel([("linear", 0), *chain, *chain]), torch.randn(5, 4), stages=stages)
    graph = read_operations(joint, segments)
    shared = Blocks(graph)
    earlier = set(graph.always_live)
    for segment in range(segments):
        own = sorted(storage for storage in graph.makers if graph.segment_of[storage] == segment)
        saved = frozenset(storage for storage in own if data.draw(st.booleans()))
        found = Blocks(graph).variants(segment, saved | earlier, MAX_REMAT_LEVEL)
        assert shared.costs(segment, saved, earlier, MAX_REMAT_LEVEL) == [
            (block.peak, block.seconds) for block in found
        ]
        earlier |= set(own)


def test_layers_that_repeat_are_alike_and_others_are_not() -> None:
    blocks = Blocks(operations_of(mlp(depth=6), torch.randn(64, 16)))
    first, *inner, last = (
        backward_key(blocks.graph, segment, blocks.entering[segment], blocks.lasting[segment])[0]
        for segment in range(blocks.graph.segments)
    )
    assert len(inner) >= 4 and len(set(inner)) == 1
    assert first not in inner and last not in inner
