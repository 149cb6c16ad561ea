"""Copies of nodes, which planning makes by the hundred thousand: each plan that is tried is written into a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import fx

__all__ = ["copy_node"]


def copy_node(graph: fx.Graph, node: fx.Node, of: Callable[[fx.Node], Any]) -> fx.Node:
    """A copy of a node at the graph's insertion point, as ``graph.node_copy(node, of)`` makes it.

    ``create_node`` looks through all arguments for raw symbolic numbers, to warn of them; that takes as long as making
    the node, and the node that is copied has been looked at. So arguments are set afterwards.

    Args:
        graph: where the copy is made.
        node: it may be of another graph.
        of: the copy of a node that is read.
    """
    made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    if node.args:
        made.args = fx.node.map_arg(node.args, of)
    if node.kwargs:
        made.kwargs = fx.node.map_arg(node.kwargs, of)
    made.meta = copy.copy(node.meta)
    return made
