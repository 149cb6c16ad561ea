"""Equal backwards: a key for the backward of a segment that ignores the numbers of its storages.

Layers repeat, so a result for the backward of one segment holds for all with the same key. ::

    layer 0   reads 7, 9    recomputes 8 from 7      key ((0, 1), (2 from 0))    {7: 0, 9: 1, 8: 2}
    layer 1   reads 17, 19  recomputes 18 from 17    the same key                {17: 0, 19: 1, 18: 2}
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from roundpipe_fx.analysis.operations import OperationGraph, RecomputeRecipe


def backward_key(
    graph: OperationGraph, segment: int, entering: Collection[int], lasting: Collection[int]
) -> tuple[Any, dict[int, int]]:
    """The shape of a segment's backward with everything that it may recompute.

    Args:
        entering: storages of the backward that live when it begins.
        lasting: storages of the backward that live when it ends.

    Returns:
        a key that is equal, and hashes equally, for backwards that are alike; and the storages by their number in it.
    """
    # Storages are numbered in the order in which they are met, so two segments whose operations read and make storages
    # in the same pattern get the same numbers: reads (417, 412) and (902, 897) are both (0, 1).
    numbers: dict[int, int] = {}
    pending: list[int] = []

    def number(storage: int) -> int:
        if storage not in numbers:
            numbers[storage] = len(numbers)
            pending.append(storage)
        return numbers[storage]

    def numbered(storages: Collection[int]) -> tuple[int, ...]:
        return tuple([number(storage) for storage in storages])

    def recipe(original: RecomputeRecipe | None) -> Any:
        if original is None:
            return None
        inplace_candidates = numbered(original.operation.inplace_candidates)
        return (
            original.form,
            numbered(original.reads),
            numbered(original.makes),
            inplace_candidates,
            original.workspace,
            original.seconds,
        )

    shape: list[Any] = []
    for operation in graph.backward[segment]:
        # An operation that only draws a dropout's mask needs the shape of this operand, not its elements.
        mask_only = [storage for storage in operation.reads if (storage, operation.index) in graph.rng_shape_sources]
        reads, makes, inplace_candidates = (
            numbered(operation.reads),
            numbered(operation.makes),
            numbered(operation.inplace_candidates),
        )
        shape.append((reads, makes, inplace_candidates, numbered(mask_only), operation.workspace))
    for storage in pending:  # grows while their sources are numbered
        always_live = storage in graph.always_live
        # Only the segment's own storages can be recomputed here. Of others the bytes count, and when they live.
        is_local = graph.is_forward(storage) and graph.segment_of[storage] == segment and not always_live
        recipes = (recipe(graph.recipes.get(storage)), recipe(graph.mask_only.get(storage))) if is_local else None
        shape.append((graph.sizes[storage], always_live, storage in entering, storage in lasting, recipes))
    return tuple(shape), numbers
