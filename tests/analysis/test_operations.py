from __future__ import annotations

import torch
from torch import nn

from roundpipe_fx.analysis.read_operations import read_operations
from roundpipe_fx.ir.joint_graph import Mark
from roundpipe_fx.passes.cse import eliminate_common_subexpressions
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import search
from tests.remat.graphs import mlp, staged


def test_a_segment_of_which_nothing_is_left() -> None:
    """Values that equal earlier ones are those; a segment that made nothing else is empty, and still has a stage."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = torch.tanh(self.layer(x))
            return (first + torch.tanh(self.layer(x))).square().mean()

    joint, segments = staged(nn.Sequential(mlp(2).blocks, Twice()), torch.randn(32, 16), stages=2)
    joint = eliminate_common_subexpressions(joint)
    for node in joint.computed():  # as if the last segments had been one more
        node.meta[Mark.SEGMENT] += node.meta[Mark.SEGMENT] > 1
    graph = read_operations(joint, segments + 1)
    assert not graph.backward[2] and not any(operation.segment == 2 for operation in graph.forward)
    assert graph.stages[2] == graph.stages[1]
    candidates = search(Blocks(graph)).candidates
    assert candidates[-1].peak.bytes < candidates[0].peak.bytes
