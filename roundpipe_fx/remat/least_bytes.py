"""Bytes that a step needs under every schedule of its operations: what one of them reads and makes.

It is a cheap bound, far below the least peak of most models. Where it is above a budget, no plan needs to be searched
for.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_fx.analysis.operations import Operation, OperationGraph
from roundpipe_fx.remat.schedule import name_of

__all__ = ["LeastBytes", "least_bytes"]


@dataclass(frozen=True, kw_only=True)
class LeastBytes:
    """The most bytes that one operation needs.

    Attributes:
        bytes: how many.
        operation: which; ``None``: there is none.
        live: names and bytes of what it reads and makes, the largest first.
    """

    bytes: int
    operation: Operation | None
    live: tuple[tuple[str, int], ...]


def least_bytes(graph: OperationGraph) -> LeastBytes:
    """Bytes of an operation's operands, results and workspace, those of a result that may be an operand's once.

    Args:
        graph: the operations.
    """
    backward = [operation for block in graph.backward.values() for operation in block]
    held = graph.outputs | graph.held

    def live(operation: Operation) -> set[int]:
        with_callers = held if operation.index >= len(graph.forward) else frozenset()
        return {*operation.reads, *operation.makes, *with_callers}

    def size(operation: Operation) -> int:
        written_over = max((graph.sizes[storage] for storage in operation.inplace_candidates), default=0)
        return sum(graph.sizes[storage] for storage in live(operation)) + operation.workspace - written_over

    most = max([*graph.forward, *backward], key=size, default=None)
    if most is None:
        return LeastBytes(bytes=0, operation=None, live=())
    values = sorted(((name_of(graph, storage), graph.sizes[storage]) for storage in live(most)), key=lambda it: -it[1])
    return LeastBytes(bytes=size(most), operation=most, live=tuple(values))
