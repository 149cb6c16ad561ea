"""alike: what the backward of a segment looks like, but for the numbers of its storages.

Layers repeat; what was worked out for the backward of one holds for all that have the same shape.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from roundpipe_fx.analysis.operations import OperationGraph, Way

__all__ = ["shape_of_backward"]


def shape_of_backward(
    graph: OperationGraph, segment: int, entering: Collection[int], lasting: Collection[int]
) -> tuple[Any, dict[int, int]]:
    """The shape of a segment's backward with all that it may make again.

    Args:
        graph: the operations.
        segment: whose backward.
        entering: storages of the backward that live when it begins.
        lasting: storages of the backward that live when it ends.

    Returns:
        something that is equal, and hashes equally, for backwards that are alike; and storages by number, as they are
        numbered there.
    """
    numbers: dict[int, int] = {}
    pending: list[int] = []

    def number(storage: int) -> int:
        if storage not in numbers:
            numbers[storage] = len(numbers)
            pending.append(storage)
        return numbers[storage]

    def numbered(storages: Collection[int]) -> tuple[int, ...]:
        return tuple([number(storage) for storage in storages])

    def way(found: Way | None) -> Any:
        if found is None:
            return None
        over = numbered(found.operation.over)
        return found.form, numbered(found.reads), numbered(found.makes), over, found.scratch, found.seconds

    shape: list[Any] = []
    for operation in graph.backward[segment]:
        alone = [storage for storage in operation.reads if (storage, operation.index) in graph.stand_ins]
        reads, makes, over = numbered(operation.reads), numbered(operation.makes), numbered(operation.over)
        shape.append((reads, makes, over, numbered(alone), operation.workspace))
    for storage in pending:  # grows while what they are made from is numbered
        at_hand = storage in graph.at_hand
        own = graph.is_forward(storage) and graph.segment_of[storage] == segment and not at_hand
        made = (way(graph.ways.get(storage)), way(graph.alone.get(storage))) if own else None
        shape.append((graph.sizes[storage], at_hand, storage in entering, storage in lasting, made))
    return tuple(shape), numbers
