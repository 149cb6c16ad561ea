"""Offloading in pipelines: plans that fit a budget because devices offload values between two reads.

A plan that saves many values fits a small budget if enough of them are offloaded
(:mod:`roundpipe_fx.schedules.choose_offloads`); one that saves few may fit without. The quicker one depends on the
recomputation and on the link's speed. So the chain of segments is solved for several prices of a transferred byte
(:mod:`roundpipe_fx.remat.options_on_host`), and the schedule of each solution is simulated with the link::

    price      1/64 ────── 1/16 ────── 1/4 ────── 1 ─────▶     × the seconds in which the link carries a byte
    leaves     much                               little
    step       3.4 s       3.1 s      2.9 s      3.2 s         next: the prices between 1/4 and its neighbours
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from roundpipe_fx.pipeline.host_memory import host_memory_of
from roundpipe_fx.pipeline.settings import Pipelining
from roundpipe_fx.planner.evaluation import ScheduleEvaluation, with_timing
from roundpipe_fx.schedules import simulate_time
from roundpipe_fx.schedules.choose_offloads import OffloadRule, offloads_within
from roundpipe_fx.schedules.offloads import offloads_at_distance

_DISTANCES = (1, 2, 4)
"""Numbers of actions beside which values are copied; without any, a device waits for each copy."""
_STEP = 2.0
_PRICES = (-2 * _STEP, -_STEP, 0.0)
"""Prices that are tried first, as powers of two."""
_ROUNDS = 3
"""How often prices between the best one and its neighbours are tried."""
_NEAR = 1.02
"""No more prices are tried for a step that takes at most so many times the seconds of one that recomputes nothing."""
_SHARES = (0.9, 0.8)
"""Shares of the limit within which the chain is solved then, at a lower price: copies need room on the device."""


def may_offload_unasked(attempt: ScheduleEvaluation, pipelining: Pipelining) -> bool:
    """Return whether values may be offloaded without a request by the user, and a copy has the time.

    Args:
        attempt: any, with nothing there.
    """
    if pipelining.offloaded:
        return True
    costs = attempt.emitted.main.costs
    if costs.host_bandwidth is None or not pipelining.sends_unasked:
        return False
    may_leave, _ = offloads_at_distance(attempt.timing.schedule, costs, {}, 0)
    return bool(may_leave)


def offload_to_fit(attempt: ScheduleEvaluation, limit: int) -> ScheduleEvaluation:
    """An attempt with as much on the host as brings its devices within a limit; the quickest, or the nearest to it.

    Args:
        limit: bytes that a device may allocate, at any position of its order.
    """
    # Nothing has to leave.
    if attempt.peak <= limit:
        return attempt
    # Each rule says from how many actions' distance values are copied, and in which order they are chosen.
    tried = [_apply_rule(attempt, OffloadRule(limit, distance)) for distance in _DISTANCES]
    tried += [_apply_rule(attempt, OffloadRule(limit, distance, in_time=True)) for distance in _DISTANCES[1:]]
    if min(candidate.peak for candidate in tried) > limit:
        tried.append(_apply_rule(attempt, OffloadRule(limit, 0)))
    return min(tried, key=lambda candidate: _cost(candidate, limit))


def _apply_rule(attempt: ScheduleEvaluation, rule: OffloadRule) -> ScheduleEvaluation:
    timing, costs = attempt.timing, attempt.emitted.main.costs
    # A rule chooses from bytes with nothing on the host.
    if timing.offloads:  # those that leave under any rule
        timing = simulate_time(timing.schedule, timing.graph, costs)
    offloads = offloads_within(timing, costs, {}, rule)
    timing = simulate_time(timing.schedule, timing.graph, costs, offloads=offloads)
    sent = dataclasses.replace(attempt, candidate=dataclasses.replace(attempt.candidate, sent=rule))
    return with_timing(sent, dataclasses.replace(attempt.emitted, offload=rule), timing)


def search_link_prices(
    attempt_at: Callable[[float, int], ScheduleEvaluation],
    limit: int,
    least: float,
    pipelining: Pipelining,
    host_budget: int | None,
) -> list[ScheduleEvaluation]:
    """Attempts with values on the host: at some prices of the link, and at prices around the best of them.

    Args:
        attempt_at: the attempt at a price and within bytes of a device as the chain counts them, with nothing on the
            host. The price is a multiple of the seconds in which the link carries a byte.
        limit: bytes that a device may allocate, at any position of its order.
        least: seconds of the step if everything is saved and nothing leaves.
        host_budget: bytes of the host; ``None``: no limit.
    """
    attempts: dict[float, ScheduleEvaluation] = {}
    sent: dict[int, ScheduleEvaluation] = {}

    def attempt_with(power: float, share: float = 1.0) -> ScheduleEvaluation:
        attempt = attempt_at(2.0**power, int(limit * share))
        if id(attempt) not in sent:  # prices that differ often make the same choice
            sent[id(attempt)] = offload_to_fit(attempt, limit)
        return sent[id(attempt)]

    def cost(power: float) -> tuple[int, int, float]:
        attempt = attempts[power]
        beyond, seconds = _cost(attempt, limit)
        on_host = 0
        if host_budget is not None:
            needed = host_memory_of(attempt.emitted, attempt.timing, pipelining).total
            on_host = max(needed - host_budget, 0)
        return beyond, on_host, seconds

    def is_near() -> bool:
        return min(map(cost, attempts)) <= (0, 0, _NEAR * least)

    # Powers of two: 1/16, 1/4 and 1 times the seconds that the link takes for a byte.
    for power in _PRICES:
        attempts[power] = attempt_with(power)
    for _ in range(_ROUNDS):
        if is_near():
            return list(sent.values())
        powers = sorted(attempts)
        # Golden-section style: halve the distance to both neighbours of the best price.
        best = min(powers, key=cost)
        position = powers.index(best)
        lower = powers[position - 1] if position else best - 2 * _STEP
        higher = powers[position + 1] if position + 1 < len(powers) else best + 2 * _STEP
        for other in (lower, higher):
            if attempts.get(other) is not attempts[best]:
                between = (best + other) / 2
                attempts[between] = attempt_with(between)
    best = min(attempts, key=cost)
    # With a little less memory other choices are made, which may leave the link idle in fewer places.
    for share in _SHARES:
        attempt_with(best - _STEP / 4, share)
    return list(sent.values())


def _cost(attempt: ScheduleEvaluation, limit: int) -> tuple[int, float]:
    """The order of plans: bytes beyond the limit, then seconds."""
    return max(attempt.peak - limit, 0), attempt.seconds
