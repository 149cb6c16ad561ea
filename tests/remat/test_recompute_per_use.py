"""Sequences that recompute per use: what several drops together gain, and no more recomputation than that takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.recompute_per_use import recompute_per_use
from roundpipe_fx.remat.schedule import recompute_just_in_time
from tests.hugging_face import gpt2, language_batch
from tests.remat.graphs import operations_of


class _Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2(layers=3)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.model(input_ids=tokens, labels=labels).loss


def _mlp_of_gpt2() -> tuple[OperationGraph, int, frozenset[int]]:
    """The graph of a GPT-2, the segment of its second MLP, and what its backward need not make again."""
    graph = operations_of(_Loss(), *language_batch(8, 32).values())
    _, segment, *_ = (i for i, block in graph.backward.items() if any("tanh" in op.node.name for op in block))
    earlier = {storage for storage in graph.makers if graph.segment_of[storage] < segment}
    return graph, segment, graph.always_live | earlier


def test_the_backward_of_gelu_needs_four_wide_values_at_a_time() -> None:
    # Nearly all its operations, forward and backward, are on values four times as wide as the model.
    graph, segment, available = _mlp_of_gpt2()
    wide = 8 * 32 * 4 * 32 * 4
    first, *_, lowest = Blocks(graph).variants(segment, available)
    assert first.peak > 5.5 * wide and 4 * wide <= lowest.peak < 4.4 * wide
    assert lowest.seconds > first.seconds


def test_what_fits_is_not_made_again() -> None:
    graph, segment, available = _mlp_of_gpt2()
    steps = recompute_just_in_time(graph, segment, available)
    readers = [position for position, step in enumerate(steps) if step.recipe is None]
    sequence = recompute_per_use(steps, [readers], lambda sequence: 1, below=2)
    assert sequence is not None and sorted(sequence) == list(range(len(steps)))  # if memory does not matter
    longest = recompute_per_use(steps, [readers], lambda sequence: -len(sequence), below=0)
    assert longest is not None and len(longest) > 1.5 * len(steps)  # if nothing else does
    assert recompute_per_use(steps, [readers], lambda sequence: 1, below=1) is None
