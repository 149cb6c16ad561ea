"""The loss among the results of a graph: Dynamo also returns the tensors that a forward has kept elsewhere.

A hook stores a weight (``weight_norm``), a module an attention map or a running mean, an object a value for a log. Each
is a result of the graph, as the loss is. A step differentiates the loss alone, so the others are detached.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


@torch.compiler.allow_in_graph
def mark_loss(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss as it is; Dynamo's graph has a call of this function."""
    return loss


def detach_all_but_loss(module: fx.GraphModule) -> None:
    """Detach all results of Dynamo's graph but the loss, in place; a graph without a marked loss stays as it is."""
    marks = module.graph.find_nodes(op="call_function", target=mark_loss)
    if not marks:
        return
    output = module.graph.output_node()
    before: Any = output.args[0]
    results = []
    for node in before:
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.requires_grad and node not in marks:
            with module.graph.inserting_before(output):
                detached = module.graph.call_method("detach", (node,))
            detached.meta["example_value"] = value.detach()
            node = detached
        results.append(node)
    output.args = (type(before)(results),)
    for mark in marks:
        (loss,) = mark.all_input_nodes
        mark.replace_all_uses_with(loss)
        module.graph.erase_node(mark)
    module.recompile()
