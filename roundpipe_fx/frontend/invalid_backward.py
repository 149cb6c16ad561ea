"""Graphs with a forward that runs and a backward that cannot be computed.

Eager PyTorch raises an error in ``backward()``, AOTAutograd as soon as the graph is compiled. A model whose backward
nobody calls, as in an evaluation without ``torch.no_grad()``, is run eagerly instead.
So are calls of other graphs that cannot be run as compiled.

A backward may be wrong in eager PyTorch too: it differentiates the bodies of ``torch.cond`` and ``map`` by running them
once more, without the state that their generators had, so the gradient of a dropout inside has another mask than the
dropout. (Seen with PyTorch 2.13.) Of that the user is warned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import fx

from roundpipe_fx.ir.bodies import draws_inside
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.source import find_line
from roundpipe_fx.torch_private import PassedThrough

_ERRORS = (
    "needed for gradient computation has been modified by an inplace operation",
    "returned an invalid gradient",
    "returned an incorrect number of gradients",
    "derivative for ",
)
"""What autograd says; eagerly in ``backward()``."""


class InvalidBackwardError(PassedThrough, RuntimeError):
    """Autograd cannot compute the gradients of a graph."""


def is_of_backward(error: BaseException) -> bool:
    """Tell whether autograd raised an error in a backward, not the model in its forward."""
    text = str(error)
    return any(message in text for message in _ERRORS)


def warn_of_invalid_backward(error: InvalidBackwardError) -> None:
    """Warn that a graph runs eagerly."""
    reason = str(error).partition("\n")[0].partition(" Hint: ")[0].removesuffix(".")
    warnings.warn(
        f"roundpipe_fx: gradients cannot be computed: {reason}. The forward runs eagerly, no memory_budget bounds it, "
        "and backward() raises this error, as eager PyTorch does. Under torch.no_grad() the forward is compiled.",
        stacklevel=2,
    )


def eager_graph(module: fx.GraphModule) -> Callable[..., Any]:
    """A copy of Dynamo's graph that is run with autograd, operation by operation.

    Examples of inputs, which would keep the user's tensors alive, are left out. Code is generated at the first call.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for node in graph.nodes:
        node.meta = {}
    graphs: list[fx.GraphModule] = []

    def run(*arguments: Any) -> Any:
        if not graphs:
            graphs.append(fx.GraphModule(module, graph))
        return graphs[0](*arguments)

    return run


def warn_of_redrawn_numbers(joint: JointGraph) -> None:
    """Warn of operators that draw random numbers in the backward, where they differentiate a body."""
    dependent = joint.find_tangent_dependents()
    redrawing = [node for node in joint.computed() if node in dependent and draws_inside(node, joint.module)]
    lines = {find_line(node): str(node.target) for node in redrawing}
    for line, operator in lines.items():
        where = f" at {line}" if line else ""
        warnings.warn(
            f"roundpipe_fx: the body of an operator ({operator}){where} draws random numbers, as a dropout does, and "
            "draws others when PyTorch differentiates it, without a compiler too, so its gradients are not those of "
            "what was computed. Draw outside of the body and pass it what was drawn.",
            stacklevel=2,
        )
