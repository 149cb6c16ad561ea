"""Balance: a chain of items cut into runs so that the costliest run costs as little as can be. Exact."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

__all__ = ["add_stage", "even_runs", "partition"]


def even_runs(seconds: Sequence[float], count: int) -> list[tuple[int, int]]:
    """(first, last) of each of ``count`` runs of consecutive items, the slowest as fast as can be."""
    if not count:
        return []
    size = len(seconds)
    total = torch.zeros(size + 1, dtype=torch.float64)
    total[1:] = torch.tensor(seconds, dtype=torch.float64).cumsum(0)
    costs = total[None, :] - total[:size, None]
    empty = torch.arange(size + 1)[None, :] <= torch.arange(size)[:, None]
    starts = partition(costs.masked_fill(empty, torch.inf), [0] * size, count)
    return [(start, end - 1) for start, end in pairwise([*starts, size])]


def add_stage(best: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
    """Given the least slowest-stage cost of each prefix, the same with one stage more."""
    count = costs.shape[0]
    return torch.maximum(best[:count, None], costs).amin(0)


def partition(costs: torch.Tensor, entry_bytes: list[int], stages: int) -> list[int]:
    """First segment of each of exactly ``stages`` stages: least slowest stage, then least bytes across the cuts."""
    count = costs.shape[0]
    best = costs[0]
    for _ in range(stages - 1):
        best = add_stage(best, costs)
    slowest = best[count]
    crossing = torch.tensor(entry_bytes, dtype=torch.float64)
    allowed = torch.where(costs <= slowest, 0.0, torch.inf).to(torch.float64)
    cheapest = allowed[0]
    choices: list[torch.Tensor] = []
    for _ in range(stages - 1):
        cheapest, choice = (cheapest[:count, None] + crossing[:, None] + allowed).min(0)
        choices.append(choice)
    starts = []
    end = count
    for choice in reversed(choices):
        end = int(choice[end])
        starts.append(end)
    return [0, *reversed(starts)]
