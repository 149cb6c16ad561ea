"""reinplace: writes results over operands that are no longer needed.

The joint graph is functional so that it can be cut anywhere; if it ran unchanged, every operation would allocate. In a
finished stage module an operation may write over an operand that was computed in this module, dies here, has the
result's shape, strides and dtype, and does not share its storage with a value that is still needed. The values are
bitwise equal; the peak is lower. Only for stages that run eagerly: compilers want functional graphs and reuse memory
themselves. The forms are those of :mod:`roundpipe_fx.analysis.in_place`.
"""

from __future__ import annotations

from torch import fx

from roundpipe_fx.analysis.in_place import in_place_forms
from roundpipe_fx.analysis.storage_ids import OUTSIDE, StorageIds
from roundpipe_fx.ir.joint_graph import input_nodes, tensor_values


def reinplace(graph: fx.Graph) -> fx.Graph:
    """Replace operations by their in-place form where that changes only memory.

    Args:
        graph: a stage module's graph, functional; it is rewritten.
    """
    nodes = list(graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    numbers = StorageIds()
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            numbers.assign(node, [OUTSIDE] * len(tensor_values(node)))
        elif node.op != "output":
            numbers.follow(node)
    last_use = {
        storage: position[node]
        for node in nodes
        for storage in (*numbers.get(node), *(s for source in input_nodes(node) for s in numbers.get(source)))
    }
    # A result that was written over its operand is in the operand's storage.
    moved: dict[int, int] = {}

    def storages_of(node: fx.Node) -> set[int]:
        storages_now = set()
        for storage in numbers.get(node):
            while storage in moved:
                storage = moved[storage]
            storages_now.add(storage)
        return storages_now

    def dies(operand: fx.Node, node: fx.Node) -> bool:
        """Return whether an operand, with all its aliases, is dead after a node."""
        storages = storages_of(operand)
        return (
            OUTSIDE not in storages
            and all(last_use.get(storage, 0) <= position[node] for storage in storages)
            and not any(storages & storages_of(source) for source in input_nodes(node) if source is not operand)
        )

    for node in nodes:
        form = next(iter(in_place_forms(node, dies)), None)
        if form is None:
            continue
        (old,), (new,) = storages_of(form.operand), numbers.get(node)
        node.target = form.target
        if form.output is not None:
            node.update_kwarg(form.output, form.operand)
        moved[new] = old
        last_use[old] = last_use.get(new, position[node])
    return graph
