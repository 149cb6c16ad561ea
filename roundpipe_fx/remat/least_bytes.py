"""The least bytes of a step under any schedule: the operands, results and workspace of its largest operation.

It is a cheap bound, far below the least peak of most models. Where it is above a budget, no plan needs to be searched
for.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_fx.analysis.operations import Operation, OperationGraph
from roundpipe_fx.remat.schedule import name_of


@dataclass(frozen=True, kw_only=True)
class LeastBytes:
    """The most bytes that one operation needs.

    Attributes:
        bytes: the smallest budget in bytes that some plan meets.
        operation: which; ``None``: there is none.
        live: names and bytes of what it reads and makes, the largest first.
    """

    bytes: int
    operation: Operation | None
    live: tuple[tuple[str, int], ...]


def least_bytes(graph: OperationGraph) -> LeastBytes:
    """Bytes of an operation's operands, results and workspace, those of a result that may be an operand's once."""
    backward = [operation for block in graph.backward.values() for operation in block]
    most = max([*graph.forward, *backward], key=lambda needed: bytes_of_operation(graph, needed), default=None)
    if most is None:
        return LeastBytes(bytes=0, operation=None, live=())
    named = ((name_of(graph, storage), graph.sizes[storage]) for storage in _live_storages(graph, most))
    values = sorted(named, key=lambda it: -it[1])
    return LeastBytes(bytes=bytes_of_operation(graph, most), operation=most, live=tuple(values))


def bytes_of_operation(graph: OperationGraph, operation: Operation) -> int:
    """Bytes of an operation's operands, results and workspace, and of what the caller holds beside them."""
    # A result that may be written over an operand needs no memory of its own.
    written_over = max((graph.sizes[storage] for storage in operation.inplace_candidates), default=0)
    return (
        sum(graph.sizes[storage] for storage in _live_storages(graph, operation)) + operation.workspace - written_over
    )


def _live_storages(graph: OperationGraph, operation: Operation) -> set[int]:
    # In the backward the caller holds the outputs as well.
    with_callers = graph.outputs | graph.held if operation.index >= len(graph.forward) else frozenset()
    return {*operation.reads, *operation.makes, *with_callers}
