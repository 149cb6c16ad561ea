"""Regions with their own budgets: ``memory_budget`` around a part of the model limits what its segments may save."""

from __future__ import annotations

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.remat.frontier import Saving


def drop_over_region_budget(graph: OperationGraph, frontiers: list[list[Saving]]) -> list[list[Saving]]:
    """Leave out options that save more of a region than its budget allows.

    A region's budget is divided among the segments that it spans, each getting the same share of the way from the
    least it can keep of the region to the most. The option that saves least always remains.

    Args:
        graph: the operations, with their regions.
        frontiers: options by segment, the one that saves most first.
    """
    for storages, budget in graph.regions:
        # Example: a region of 100 MB over two segments that can keep 10 to 60 and 20 to 80 MB of it. least = 30, most =
        # 140, share = 70 / 110; the limits are 10 + 50 · share and 20 + 60 · share, together 100.
        kept = [[_bytes(graph, saving.saved & storages) for saving in savings] for savings in frontiers]
        least, most = sum(map(min, kept)), sum(map(max, kept))
        share = budget
        if isinstance(budget, int):
            share = min(max((budget - least) / (most - least), 0.0), 1.0) if most > least else 1.0
        frontiers = [
            [saving for saving, size in zip(savings, sizes, strict=True) if size <= _limit(sizes, share)]
            for savings, sizes in zip(frontiers, kept, strict=True)
        ]
    return frontiers


def _limit(sizes: list[int], share: float) -> float:
    return min(sizes) + share * (max(sizes) - min(sizes))


def _bytes(graph: OperationGraph, storages: frozenset[int]) -> int:
    return sum(graph.sizes[storage] for storage in storages)
