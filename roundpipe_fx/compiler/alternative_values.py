"""Values that an emitted graph saves and recomputes, as the page of a plan compares them with other plans'."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from roundpipe_fx.compiler.planned_values import list_allocating, storage_bytes
from roundpipe_fx.ir.alternative_plans import AlternativeValue
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, is_tensor, module_path, saved_values
from roundpipe_fx.ir.source import find_line
from roundpipe_fx.torch_private import module_path_text


def saved_nodes(joint: JointGraph) -> dict[str, fx.Node]:
    """Tensors that the forward computes and passes to the backward, by name.

    Args:
        joint: the graph, after all passes.
    """
    return _index_by_name(node for node in saved_values(joint) if node.op != "placeholder")


def recomputed_nodes(joint: JointGraph) -> dict[str, fx.Node]:
    """Tensors that the backward recomputes, by the name of what they repeat.

    Args:
        joint: the graph, after all passes.
    """
    return _index_by_name(list_allocating(node for node in joint.computed() if Mark.ORIGIN in node.meta))


def alternative_value(node: fx.Node) -> AlternativeValue:
    """Describe a value for the page.

    Args:
        node: one that computes it.
    """
    return AlternativeValue(
        name=node.meta.get(Mark.ORIGIN, node.name),
        module=module_path(node, module_path_text),
        line=find_line(node),
        bytes=storage_bytes(node),
        seconds=float(node.meta.get(Mark.SECONDS, 0.0)),
    )


def _index_by_name(nodes: Iterable[fx.Node]) -> dict[str, fx.Node]:
    return {node.meta.get(Mark.ORIGIN, node.name): node for node in nodes if is_tensor(node)}
