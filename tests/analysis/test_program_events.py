"""What emitted programs do to memory."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import fx, nn

from roundpipe_fx.analysis import program_events


def test_what_is_known_of_a_stage_module_does_not_keep_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.neg.default, (x,))
    for node in (x, y):
        node.meta["val"] = torch.empty(8, device="meta")
    graph.output((x, y))
    module = fx.GraphModule(nn.Module(), graph)
    found = program_events._follow_once(module, ((0,),))
    assert found is program_events._follow_once(module, ((0,),))
    assert found.operations == [(1, [0], [1], 0)] and found.sizes == [32] and found.returns == [[0], [1]]
    kept = weakref.ref(module)
    del module, graph, x, y, node
    gc.collect()
    assert kept() is None
