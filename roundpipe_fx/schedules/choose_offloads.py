"""Chooses which values an offloaded model's step sends to the host: as few bytes as bring each device within its limit.

An offload lowers the bytes of its device between two positions, so this is a covering of positions by intervals. Where
all values have the same size, going through the positions and taking at each one over the limit the value that stays
away longest is optimal (Belady, 1966, for pages); with different sizes it is a heuristic. In the end, values that later
choices have made superfluous stay.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roundpipe_fx.schedules.offloads import Offload, offloads_at_distance
from roundpipe_fx.schedules.step_costs import StepCosts
from roundpipe_fx.schedules.timing import Timing

__all__ = ["OffloadRule", "choose_offloads", "offloads_within"]


@dataclass(frozen=True)
class OffloadRule:
    """How it is decided what leaves: the same for every number of microbatches.

    Attributes:
        limit: bytes per device.
        distance: number of actions beside which a value is copied, in each direction.
    """

    limit: int
    distance: int


def offloads_within(
    timing: Timing, costs: StepCosts, others: Mapping[int, StepCosts], rule: OffloadRule
) -> list[Offload]:
    """What leaves by a rule, and what the user wants on the host whatever the rule.

    Args:
        timing: of the schedule if nothing leaves.
        costs: of the stage actions.
        others: costs of microbatches of another size, by index.
        rule: the rule.
    """
    if max(timing.peak_bytes) <= rule.limit and not costs.wanted_on_host:
        return []
    may, must = offloads_at_distance(timing.schedule, costs, others, rule.distance)
    during = [own.copy() for own in timing.action_bytes]
    for own in must:
        during[own.device][own.freed : own.reloads] -= own.bytes
    return sorted([*must, *choose_offloads(may, during, rule.limit)], key=_place)


def choose_offloads(candidates: Sequence[Offload], action_bytes: Sequence[np.ndarray], limit: int) -> list[Offload]:
    """The values that leave. Positions that no candidate can bring within the limit get as near to it as possible.

    Args:
        candidates: all that may leave; times of one value do not overlap.
        action_bytes: for each device, the bytes allocated there during each of its actions, with everything present.
        limit: bytes per device.
    """
    chosen: list[Offload] = []
    for device, during in enumerate(action_bytes):
        left = during.astype(np.int64)
        own = _cover([tried for tried in candidates if tried.device == device], left, limit)
        chosen += _without_superfluous(own, left, limit)
    return sorted(chosen, key=_place)


def _place(own: Offload) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
    return own.device, own.leaves, own.microbatch, own.values


def _cover(candidates: Sequence[Offload], left: np.ndarray, limit: int) -> list[Offload]:
    """Offloads that lower ``left`` to the limit, position by position."""
    waiting = sorted(range(len(candidates)), key=lambda index: candidates[index].freed, reverse=True)
    away_longest: list[tuple[int, int, int]] = []
    chosen: list[Offload] = []
    for place in range(len(left)):
        while waiting and candidates[waiting[-1]].freed <= place:
            index = waiting.pop()
            heapq.heappush(away_longest, (-candidates[index].reloads, -candidates[index].bytes, index))
        while left[place] > limit and away_longest and -away_longest[0][0] > place:
            own = candidates[heapq.heappop(away_longest)[2]]
            left[own.freed : own.reloads] -= own.bytes
            chosen.append(own)
    return chosen


def _without_superfluous(chosen: Sequence[Offload], left: np.ndarray, limit: int) -> list[Offload]:
    """Offloads without those that may stay: no position within the limit leaves it, and none above it rises."""
    needed = []
    for own in sorted(chosen, key=lambda own: own.reloads - own.freed):
        away = left[own.freed : own.reloads]
        if (away + own.bytes <= limit).all():
            away += own.bytes
        else:
            needed.append(own)
    return needed
