"""Offloading values: plans that fit a budget because what crosses between residency windows leaves for the host.

A plan that saves much fits a small budget if enough leaves (:mod:`roundpipe_fx.schedules.choose_offloads`); one that
saves little may fit without. Which is quicker depends on how much is recomputed and on how far the link keeps up, so
both kinds are simulated, and levels in between (see :mod:`roundpipe_fx.pipeline.within_budget`)::

    level      0 ───────── 3 ──────────── 8 ──────── 12         level 8 fits with everything on the device
    leaves     much        less           nothing                level 3 may be the quickest
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from roundpipe_fx.pipeline.attempt import Attempt
from roundpipe_fx.schedules import simulate_time
from roundpipe_fx.schedules.choose_offloads import OffloadRule, offloads_within

__all__ = ["quickest_offloaded", "with_offloads"]

_DISTANCES = (1, 2, 4)
"""Numbers of actions beside which values are copied; without any, a device waits for each copy."""
_ROUNDS = 3
"""How often levels between the quickest one and its neighbours are tried."""


def with_offloads(attempt: Attempt, limit: int) -> Attempt:
    """An attempt with as much on the host as brings its devices within a limit; the quickest, or the nearest to it.

    Args:
        attempt: with nothing there.
        limit: bytes per device.
    """
    if attempt.peak <= limit:
        return attempt
    tried = [_at_distance(attempt, OffloadRule(limit, distance)) for distance in _DISTANCES]
    if min(own.peak for own in tried) > limit:
        tried.append(_at_distance(attempt, OffloadRule(limit, 0)))
    return min(tried, key=lambda own: _cost(own, limit))


def _at_distance(attempt: Attempt, rule: OffloadRule) -> Attempt:
    timing, costs = attempt.timing, attempt.pipeline.main.costs
    if timing.offloads:  # those that leave under any rule
        timing = simulate_time(timing.schedule, timing.graph, costs)
    offloads = offloads_within(timing, costs, {}, rule)
    timing = simulate_time(timing.schedule, timing.graph, costs, offloads=offloads)
    return dataclasses.replace(attempt, pipeline=dataclasses.replace(attempt.pipeline, offload=rule), timing=timing)


def _cost(attempt: Attempt, limit: int) -> tuple[int, float]:
    """What is compared: bytes beyond the limit, then seconds."""
    return max(attempt.peak - limit, 0), attempt.timing.makespan


def quickest_offloaded(attempt_at: Callable[[int], Attempt], known: Iterable[int], limit: int) -> list[Attempt]:
    """Attempts with values on the host: of known levels, and of levels around the quickest of them.

    Args:
        attempt_at: the attempt of a level, with nothing on the host.
        known: levels whose attempts have been made.
        limit: bytes per device.
    """
    found = {level: with_offloads(attempt_at(level), limit) for level in known}
    for _ in range(_ROUNDS):
        levels = sorted(found)
        best = min(levels, key=lambda level: _cost(found[level], limit))
        place = levels.index(best)
        between = {(best + other) // 2 for other in levels[max(place - 1, 0) : place + 2]} - found.keys()
        for level in between:
            found[level] = with_offloads(attempt_at(level), limit)
    return list(found.values())
