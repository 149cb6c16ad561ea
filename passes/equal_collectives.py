"""equal_collectives: collectives with equal operands run once.

Column-parallel projections of queries, keys and values each gather the same rows. The gathered tensor is saved under
every plan (:mod:`roundpipe_fx.ir.collectives`), so one of them serves all at no cost in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from roundpipe_fx.ir.collectives import is_collective
from roundpipe_fx.ir.graph_edit import substitute_node, views_of
from roundpipe_fx.ir.joint_graph import JointGraph, Phase, is_tensor


def merge_equal_collectives(joint: JointGraph) -> JointGraph:
    """Merge collectives of the forward that have equal operands. Runs after annotate.

    Outputs of the forward stay separate tensors.
    """
    returned = {value for value in joint.forward_outputs if isinstance(value, fx.Node)}
    firsts: dict[tuple[str, ...], fx.Node] = {}
    for node in joint.in_phase(Phase.FORWARD):
        target = node.target
        if not is_collective(target) or target._schema.is_mutable or not is_tensor(node):
            continue
        if not returned.isdisjoint(_shown(node)):
            continue
        first = firsts.setdefault((str(target), str(node.args), str(node.kwargs)), node)
        if first is not node:
            substitute_node(node, first)
            joint.graph.erase_node(node)
    return joint


def _shown(node: fx.Node) -> Iterator[fx.Node]:
    """All aliases of a collective's result. Waiting for it returns the same tensor, though it is recorded as a new
    one."""
    yield node
    yield from views_of(node)
    for user in node.users:
        if is_collective(user.target):
            yield user
            yield from views_of(user)
