"""Partition of a chain of items into consecutive runs whose largest cost is minimal, by dynamic programming. Exact."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


def even_runs(seconds: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Divide items into consecutive runs so that the slowest run is as fast as possible.

    Args:
        count: number of runs; at most the number of items.

    Returns:
        (first, last) item of each run.
    """
    if not count:
        return []
    starts = partition(run_costs(seconds), [0] * len(seconds), count)
    return [(start, end - 1) for start, end in pairwise([*starts, len(seconds)])]


def run_costs(seconds: Sequence[float], entry_seconds: Sequence[float] | None = None) -> torch.Tensor:
    """``costs[i, j]``: seconds of items i up to j, exclusive, and of entering item i; infinite where j <= i.

    Args:
        entry_seconds: of beginning a run at each item.
    """
    size = len(seconds)
    total = torch.zeros(size + 1, dtype=torch.float64)
    # With seconds [3, 1, 2]: total = [0, 3, 4, 6] and costs[i, j] = total[j] - total[i]
    #     costs = [[0, 3, 4, 6], [·, 0, 1, 3], [·, ·, 0, 2]]
    total[1:] = torch.tensor(seconds, dtype=torch.float64).cumsum(0)
    costs = total[None, :] - total[:size, None]
    if entry_seconds is not None:
        costs += torch.tensor(entry_seconds, dtype=torch.float64)[:, None]
    empty = torch.arange(size + 1)[None, :] <= torch.arange(size)[:, None]
    return costs.masked_fill(empty, torch.inf)


def add_stage(best: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
    """One step of the dynamic program over stages.

    Args:
        best: for each prefix of the items, the cost of the slowest stage in its best partition.
        costs: ``costs[i, j]``: cost of a stage of items i up to j, exclusive.

    Returns:
        ``best`` for partitions into one more stage.
    """
    count = costs.shape[0]
    # best'[j] = min over i of max(best[i], costs[i, j]): i is where the new stage begins.
    return torch.maximum(best[:count, None], costs).amin(0)


def partition(costs: torch.Tensor, entry_bytes: list[int], stages: int) -> list[int]:
    """Partition segments into stages: minimal cost of the slowest stage, then minimal bytes across the cuts.

    Args:
        costs: ``costs[i, j]``: cost of a stage of segments i up to j, exclusive; infinite if it is not allowed.
        entry_bytes: for each segment, bytes that are live across its beginning.

    Returns:
        index of the first segment of each stage.
    """
    count = costs.shape[0]
    best = costs[0]
    # First the smallest possible slowest stage, then, among the partitions that reach it, the fewest bytes across the
    # cuts.
    for _ in range(stages - 1):
        best = add_stage(best, costs)
    slowest = best[count]
    entering = torch.tensor(entry_bytes, dtype=torch.float64)
    allowed = torch.where(costs <= slowest, 0.0, torch.inf).to(torch.float64)
    cheapest = allowed[0]
    choices: list[torch.Tensor] = []
    for _ in range(stages - 1):
        cheapest, choice = (cheapest[:count, None] + entering[:, None] + allowed).min(0)
        choices.append(choice)
    starts = []
    # Walk back through the choices from the end of the chain.
    end = count
    for choice in reversed(choices):
        end = int(choice[end])
        starts.append(end)
    return [0, *reversed(starts)]
