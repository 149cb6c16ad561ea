"""Operators with bodies: ``torch.cond``, ``scan``, ``map``, ``while_loop`` and other higher-order operators.

A body is a graph module, which the graph that calls the operator has as an attribute.
"""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import fx, nn

from roundpipe_fx.ir.joint_graph import input_nodes, is_seeded


def is_body(node: fx.Node) -> bool:
    """Test for the body of a higher-order operator: a module that the graph has as an attribute, no value."""
    return node.op == "get_attr" and "val" not in node.meta


def list_bodies(node: fx.Node, module: nn.Module) -> list[fx.GraphModule]:
    """List the bodies of a higher-order operator, and those of operators inside of them; none of other nodes.

    Args:
        module: the module whose graph it is part of.
    """
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    called = [attrgetter(str(source.target))(module) for source in input_nodes(node) if is_body(source)]
    bodies = [body for body in called if isinstance(body, fx.GraphModule)]
    return [*bodies, *(inner for body in bodies for nested in body.graph.nodes for inner in list_bodies(nested, body))]


def draws_inside(node: fx.Node, module: nn.Module) -> bool:
    """Return whether a body of a higher-order operator draws random numbers. Arguments as for :func:`list_bodies`."""
    return any(is_seeded(inner) for body in list_bodies(node, module) for inner in body.graph.nodes)


def draws(node: fx.Node, module: nn.Module) -> bool:
    """Return whether a node draws random numbers, itself or in a body. Arguments as for :func:`list_bodies`."""
    return is_seeded(node) or draws_inside(node, module)
