"""Of a step's results only the loss is differentiated."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from roundpipe_fx.frontend.loss_mark import detach_all_but_loss, mark_loss


def _graph_of(function: Any) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch.compile(function, backend=backend, fullgraph=True)(torch.ones(2, requires_grad=True))
    return graphs[0]


def test_results_beside_the_loss_are_detached() -> None:
    def step(x: torch.Tensor) -> Any:
        y = x.exp()
        loss = y.sum()
        return mark_loss(loss), y, loss, y.argmax()

    module = _graph_of(step)
    detach_all_but_loss(module)
    loss, y, same, place = module(torch.ones(2, requires_grad=True))
    assert loss.requires_grad and not y.requires_grad and not same.requires_grad and not place.requires_grad
    assert not module.graph.find_nodes(op="call_function", target=mark_loss)


def test_a_graph_without_a_marked_loss_stays() -> None:
    module = _graph_of(lambda x: (x.exp(), x.sin()))
    before = module.code
    detach_all_but_loss(module)
    assert module.code == before
