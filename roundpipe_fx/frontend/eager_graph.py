"""Dynamo's graph as a function that eager PyTorch runs, for calls that cannot be run as compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

__all__ = ["eager_graph"]


def eager_graph(module: fx.GraphModule) -> Callable[..., Any]:
    """A copy of Dynamo's graph that is run with autograd, operation by operation.

    Examples of inputs, which would keep the user's tensors alive, are left out. Code is generated at the first call.

    Args:
        module: Dynamo's graph, prepared.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for node in graph.nodes:
        node.meta = {}
    made: list[fx.GraphModule] = []

    def run(*arguments: Any) -> Any:
        if not made:
            made.append(fx.GraphModule(module, graph))
        return made[0](*arguments)

    return run
