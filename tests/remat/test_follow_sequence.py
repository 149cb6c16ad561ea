"""Schedules that follow sequences recompute no more than these."""

import itertools

import pytest
import torch
from torch import nn

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.budget import Found
from roundpipe_fx.remat.follow_sequence import chain_of_segments, fit_sequence
from roundpipe_fx.remat.sequences.algorithms import make_sequence
from roundpipe_fx.remat.sequences.sequence import ForwardCheck, ForwardEnable, ForwardNograd
from tests.remat.graphs import operations_of

_SLOTS = 500


@pytest.fixture(scope="module")
def graph() -> OperationGraph:
    """Six blocks, of each of which only the result leads to the next."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    return operations_of(nn.Sequential(*(block() for _ in range(6))), torch.ones(64, 16))


def test_a_schedule_recomputes_no_more_than_its_sequence(graph: OperationGraph) -> None:
    chain = chain_of_segments(graph)
    everything = make_sequence(chain, 1 << 40, _SLOTS, "persistent")
    once = everything.seconds(chain)
    tried = 0
    for percent in range(30, 105, 5):
        fitted = fit_sequence(graph, everything.peak(chain) * percent // 100, _SLOTS, "persistent", 0)
        if not isinstance(fitted, Found):
            continue
        sequence, candidate = fitted.value.sequence, fitted.value.candidate
        extra = sequence.seconds(chain) - once
        assert candidate.seconds <= extra + 1e-12, f"{percent} %: {sequence}"
        # A layer runs for its backward after one that does not, which keeps no input for it.
        pairs = itertools.pairwise(sequence)
        tried += any(isinstance(b, ForwardEnable) and isinstance(a, ForwardCheck | ForwardNograd) for a, b in pairs)
    assert tried > 3
