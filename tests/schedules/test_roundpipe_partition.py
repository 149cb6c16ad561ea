from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.schedules import (
    ActionKind,
    StepCosts,
    chain,
    one_f_one_b,
    round_robin,
    simulate_time,
    slot_chain,
    validate,
)
from roundpipe_fx.schedules.partition import even_runs
from roundpipe_fx.schedules.round_robin import dispatch
from roundpipe_fx.schedules.roundpipe_partition import (
    RoundPipePartition,
    balance_roundpipe_stages,
    is_spread,
    slot_seconds,
)

DEVICES, MICROBATCHES = 2, 4


def makespan(
    forward: Sequence[float],
    backward: Sequence[float],
    tried: RoundPipePartition,
    devices: int = DEVICES,
    microbatches: int = MICROBATCHES,
) -> float:
    """As simulated, not as dispatched."""
    fused = len(tried.forward)
    again = [f + b for f, b in zip(forward, backward, strict=True)]
    slots = slot_seconds(tried, forward, backward, again)
    first, last = tried.fused
    seconds = {(ActionKind.FORWARD, slot): slots[slot] for slot in range(fused)}
    seconds |= {(ActionKind.BACKWARD, slot): slots[slot] for slot in range(fused + 1, tried.slots)}
    seconds[ActionKind.FORWARD, fused] = sum(forward[first : last + 1])
    seconds[ActionKind.BACKWARD, fused] = slots[fused] - seconds[ActionKind.FORWARD, fused]
    schedule = round_robin(devices, fused, tried.slots, microbatches, slots)
    validate(schedule, slot_chain(fused, tried.slots), microbatches, devices)
    found = simulate_time(schedule, slot_chain(fused, tried.slots), StepCosts(seconds=seconds)).makespan
    assert found == pytest.approx(dispatch(devices, slots, microbatches).makespan)
    return found


def every_division(count: int) -> Iterator[RoundPipePartition]:
    for first in range(count):
        for ahead, back in itertools.product(runs(first), runs(first)):
            yield RoundPipePartition(ahead, (first, count - 1), back[::-1])


def runs(count: int) -> list[tuple[tuple[int, int], ...]]:
    if not count:
        return [()]
    found = []
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, count), k) for k in range(count)):
        edges = [0, *cuts, count]
        found.append(tuple((a, b - 1) for a, b in itertools.pairwise(edges)))
    return found


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_near_the_best_of_all_divisions(costs: list[tuple[int, int]]) -> None:
    """Slots of one kind are balanced among each other, so the best of all may be missed; never by much."""
    forward, backward = [float(f) for f, _ in costs], [float(b) for _, b in costs]
    found = balance_roundpipe_stages(forward, backward, True, DEVICES, MICROBATCHES)
    again = [f + b for f, b in zip(forward, backward, strict=True)]
    least = min(
        makespan(forward, backward, tried)
        for tried in every_division(len(costs))
        if is_spread(tried, slot_seconds(tried, forward, backward, again), DEVICES)
    )
    covered = [segment for a, b in [*found.forward, found.fused] for segment in range(a, b + 1)]
    assert covered == list(range(len(costs)))
    back = [segment for a, b in [found.fused, *found.backward] for segment in range(b, a - 1, -1)]
    assert back == list(range(len(costs) - 1, -1, -1))
    assert least * (1 - 1e-9) <= makespan(forward, backward, found) <= 1.2 * least


def test_a_heavy_head_costs_less_than_by_the_best_bound_stages() -> None:
    devices, microbatches = 4, 16
    forward, backward = [1.0] * 8 + [4.0], [2.0] * 8 + [8.0]
    found = balance_roundpipe_stages(forward, backward, True, devices, microbatches)
    whole = [2 * f + b for f, b in zip(forward, backward, strict=True)]
    stages = even_runs(whole, devices)
    graph = chain(devices)
    seconds = {(ActionKind.FORWARD, i): sum(forward[a : b + 1]) for i, (a, b) in enumerate(stages)}
    seconds |= {
        (ActionKind.BACKWARD, i): sum(whole[a : b + 1]) - sum(forward[a : b + 1]) for i, (a, b) in enumerate(stages)
    }
    bound = simulate_time(one_f_one_b(devices, devices, microbatches), graph, StepCosts(seconds=seconds)).makespan
    assert bound >= 16.0 * microbatches  # the head's stage is never idle but at the ends
    assert makespan(forward, backward, found, devices, microbatches) <= bound / 1.3


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_even_runs_are_the_most_even(count: int) -> None:
    seconds = [3.0, 1.0, 4.0, 1.0, 5.0]
    found = even_runs(seconds, count)
    slowest = max(sum(seconds[a : b + 1]) for a, b in found)
    best = min(max(sum(seconds[a : b + 1]) for a, b in tried) for tried in runs(5) if len(tried) == count)
    assert slowest == best
