"""What devices gather of sharded parameters, what of it stays, and how many bytes that takes."""

from __future__ import annotations

import itertools

import numpy as np

from roundpipe_fx.schedules import ActionKind, StepCosts, chain, gpipe, interleaved, simulate_time
from roundpipe_fx.schedules.sharding import ShardedCosts, choose_kept, find_gaps, gathered_bytes
from roundpipe_fx.schedules.step_costs import device_orders

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
STAGES = 4


def _costs(stages: int = STAGES, size: int = 100) -> StepCosts:
    """Each stage has a parameter, with its number; nothing else has bytes."""
    steps = list(itertools.product((F, B), range(stages)))
    return StepCosts(
        seconds=dict.fromkeys(steps, 1.0),
        base_bytes={(B, stage): {stage: size - 2} for stage in range(stages)},
        sharded=ShardedCosts(
            replicas=2, whole_bytes=dict.fromkeys(range(stages), size), reads={step: (step[1],) for step in steps}
        ),
    )


def test_windows_and_gradients_are_counted() -> None:
    schedule = gpipe(1, STAGES, 1)
    timing = simulate_time(schedule, chain(STAGES), _costs())
    # F0 F1 F2 F3 B3 B2 B1 B0: two stages at any time but the last.
    # Each gradient until the next one is reduced, then its rows.
    parameters = [200] * 7 + [100]
    gradients = [0, 0, 0, 0, 0, 100 + 50, 100 + 100, 100 + 150]
    assert timing.action_bytes[0].tolist() == [sum(own) for own in zip(parameters, gradients, strict=True)]
    assert timing.peak_bytes == (400,) and timing.gathered_bytes == (600,)  # those of stages 0 and 1 twice


def test_the_shortest_gaps_are_kept_first_and_a_limit_is_kept() -> None:
    schedule, costs = interleaved(1, STAGES, 6), _costs()
    assert costs.sharded is not None
    (order,) = device_orders(schedule)
    gaps = find_gaps(order, costs.sharded)
    least = simulate_time(schedule, chain(STAGES), costs)
    all_kept = simulate_time(schedule, chain(STAGES), costs, kept=gaps)
    assert all_kept.gathered_bytes == (100 * STAGES,)  # each once
    assert least.gathered_bytes[0] == all_kept.gathered_bytes[0] + 100 * len(gaps)
    before = least.gathered_bytes[0]
    for limit in (*range(least.peak_bytes[0], all_kept.peak_bytes[0], 100), all_kept.peak_bytes[0]):
        kept = choose_kept(gaps, least.action_bytes, limit)
        timing = simulate_time(schedule, chain(STAGES), costs, kept=kept)
        assert timing.peak_bytes[0] <= limit
        assert timing.gathered_bytes[0] == gathered_bytes(order, costs.sharded, kept) <= before
        before = timing.gathered_bytes[0]
    assert before == all_kept.gathered_bytes[0]
    shortest = min(gap.regathered - gap.dropped for gap in gaps)
    room = [np.full(len(order.steps), 0)]
    first = choose_kept(gaps, room, 100)
    assert any(gap.regathered - gap.dropped == shortest for gap in first)
    assert all(gap.regathered <= then.dropped for gap, then in itertools.pairwise(first))


def test_nothing_stays_between_the_halves_of_a_step() -> None:
    schedule, costs = gpipe(1, STAGES, 2).halves(), _costs()
    assert costs.sharded is not None
    (order,) = device_orders(schedule)
    assert all(gap.regathered <= order.turn or gap.dropped >= order.turn for gap in find_gaps(order, costs.sharded))
