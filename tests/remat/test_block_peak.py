"""The peak of sequences of steps is that of their events."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe_fx.analysis.liveness import find_peak
from roundpipe_fx.remat.block_peak import BlockPeak
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.schedule import backward_events, recompute_just_in_time
from tests.remat.graphs import mlp, operations_of


class Attention(nn.Module):
    """Values that several operations of the backward read, and results that are written over their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(x).split(16, dim=-1)
        scores = F.dropout(torch.softmax(torch.tanh(q @ k.mT).exp().sin(), -1), 0.1)
        return (x + F.silu(self.outer(scores @ v)).sigmoid()).square().mean()


GRAPHS = [operations_of(mlp(), torch.randn(64, 16)), operations_of(Attention(), torch.randn(4, 32, 16))]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_the_peak_is_that_of_events(data: st.DataObject) -> None:
    graph = data.draw(st.sampled_from(GRAPHS))
    blocks = Blocks(graph)
    segment = data.draw(st.integers(0, graph.segments - 1))
    own = sorted(storage for storage in graph.makers if graph.segment_of[storage] == segment)
    saved = set(data.draw(st.lists(st.sampled_from(own), unique=True))) if own else set()
    earlier = {storage for storage in graph.makers if graph.segment_of[storage] < segment}
    steps = recompute_just_in_time(graph, segment, graph.always_live | earlier | saved)
    before, lasting = saved | blocks.entering[segment], blocks.lasting[segment]
    sequence = list(range(len(steps)))
    recomputed = [position for position in sequence if steps[position].recipe is not None]
    if recomputed:  # some run once more, wherever what they read has been made
        for position in data.draw(st.lists(st.sampled_from(recomputed), max_size=8)):
            sequence.insert(data.draw(st.integers(sequence.index(position) + 1, len(sequence))), position)
    sizes = dict(enumerate(graph.sizes))
    events, _, _ = backward_events(graph, [steps[position] for position in sequence], sizes, {})
    expected = find_peak(events, sizes, before, lasting).bytes
    peak = BlockPeak(graph, steps, before, lasting)
    assert peak(sequence) == expected
    most = data.draw(st.integers(0, 2 * expected))
    assert peak(sequence, most) == expected if expected <= most else peak(sequence, most) > most
