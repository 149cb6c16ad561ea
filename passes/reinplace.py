"""reinplace: write a result over an operand that is not needed any more.

The joint graph is functional so that it can be cut anywhere; run as it is, every operation allocates. In a finished
stage module an operation may write over its first operand if that was made in this module, dies here, and has the
result's shape, strides and dtype, and nothing else that is still needed shares its storage. The values are the same
bit for bit; the peak is lower. Only for stages that run eagerly: compilers want functional graphs and reuse memory
themselves.
"""

from __future__ import annotations

import torch
from torch import fx

from roundpipe_fx.joint_graph import input_nodes, is_tensor, storages

__all__ = ["reinplace"]

aten = torch.ops.aten

# Beside pointwise operations: those that change part of their first operand.
_PARTIAL = (
    aten.index_put,
    aten.index_add,
    aten.index_copy,
    aten.index_fill,
    aten.masked_fill,
    aten.masked_scatter,
    aten.scatter,
    aten.scatter_add,
)


def reinplace(graph: fx.Graph) -> fx.Graph:
    """Replace operations by their in-place form where that changes nothing but memory.

    Args:
        graph: a stage module's graph, functional; it is rewritten.
    """
    nodes = list(graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    last_use = _last_uses(nodes)
    outside = {storage for node in nodes if node.op in ("placeholder", "get_attr") for storage in storages(node)}
    # A result that was written over its operand lives in the operand's storage.
    moved: dict[int, int] = {}

    def homes(node: fx.Node) -> set[int]:
        found = set()
        for storage in storages(node):
            while storage in moved:
                storage = moved[storage]
            found.add(storage)
        return found

    for node in nodes:
        target = _in_place_form(node)
        if target is None:
            continue
        operand = node.args[0]
        if not isinstance(operand, fx.Node) or not _same_layout(operand, node):
            continue
        home = homes(operand)
        others = [source for source in input_nodes(node) if source is not operand]
        if (
            home & outside
            or any(last_use.get(storage, 0) > position[node] for storage in home)
            or any(home & homes(source) for source in others)
            or sum(argument is operand for argument in node.args) > 1
        ):
            continue
        node.target = target
        (old,), (new,) = home, storages(node)
        moved[new] = old
        last_use[old] = last_use.get(new, position[node])
    return graph


def _last_uses(nodes: list[fx.Node]) -> dict[int, int]:
    found: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for source in (*input_nodes(node), node):
            for storage in storages(source):
                found[storage] = index
    return found


def _in_place_form(node: fx.Node) -> torch._ops.OpOverload | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or not is_tensor(node):
        return None
    if torch.Tag.pointwise not in target.tags and target.overloadpacket not in _PARTIAL:
        return None
    packet = getattr(aten, f"{target.overloadpacket.__name__}_", None)
    form = getattr(packet, target._overloadname, None) if packet is not None else None
    if form is None:
        return None
    arguments, wanted = form._schema.arguments, target._schema.arguments
    mutated = arguments[0].alias_info is not None and arguments[0].alias_info.is_write
    same = [argument.name for argument in arguments] == [argument.name for argument in wanted]
    return form if mutated and same and not node.kwargs.keys() & {"dtype", "memory_format"} else None


def _same_layout(operand: fx.Node, result: fx.Node) -> bool:
    if operand.op != "call_function" or not is_tensor(operand):
        return False
    left, right = operand.meta["val"], result.meta["val"]
    if left.layout is not torch.strided or left.dtype != right.dtype or left.device != right.device:
        return False
    # As text: comparing symbolic sizes would add guards.
    if str(tuple(left.shape)) != str(tuple(right.shape)) or str(left.stride()) != str(right.stride()):
        return False
    whole = str(left.untyped_storage().nbytes()) == str(right.untyped_storage().nbytes())
    return whole and not any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size <= 1)
        for size, stride in zip(left.shape, left.stride(), strict=True)
    )
