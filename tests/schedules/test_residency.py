"""What devices have of a model on the host, and when: held against a walk through the actions, one after another."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.schedules import (
    ActionKind,
    Schedule,
    StageGraph,
    StepCosts,
    Timing,
    chain,
    gpipe,
    one_f_one_b,
    simulate_time,
)
from roundpipe_fx.schedules.residency import resident, window_ranges
from roundpipe_fx.schedules.timetable import NUMBER

STAGES = 3


def test_a_visit_is_a_run_of_actions_of_one_stage() -> None:
    assert window_ranges([]) == []
    assert window_ranges([4]) == [range(1)]
    assert window_ranges(np.array([0, 0, 1, 0, 2, 2])) == [range(2), range(2, 3), range(3, 4), range(4, 6)]


def test_there_is_what_this_visit_and_the_next_one_read() -> None:
    assert resident([{1}, {2}, {1, 3}]) == [{1, 2}, {1, 2, 3}, {1, 3}]


def stage_major(microbatches: int) -> Schedule:
    """One device that runs all microbatches through a stage before it turns to the next."""
    rows = [(NUMBER[ActionKind.FORWARD], stage, batch) for stage in range(STAGES) for batch in range(microbatches)]
    rows += [(NUMBER[ActionKind.BACKWARD], s, batch) for s in reversed(range(STAGES)) for batch in range(microbatches)]
    return Schedule("stage major", (np.array(rows, dtype=np.int32),))


def peak_on_foot(schedule: Schedule, costs: StepCosts) -> int:
    """Of one device, action by action."""
    order = schedule.orders[0].tolist()
    kinds = {number: kind for kind, number in NUMBER.items()}
    steps = [(kinds[kind], stage) for kind, stage, _ in order]
    starts = [place for place in range(len(order)) if not place or order[place][1] != order[place - 1][1]]
    windows = [range(start, end) for start, end in zip(starts, [*starts[1:], len(order)], strict=True)]
    reads = [set().union(*(costs.copied_bytes[steps[place]] for place in window)) for window in windows]
    sizes = {number: size for own in costs.copied_bytes.values() for number, size in own.items()}
    peak, leaving = 0, 0
    for window, own, following in zip(windows, reads, [*reads[1:], set()], strict=True):
        weights = sum(sizes[number] for number in own | following)
        sums: dict[int, int] = {}
        for place in window:
            peak = max(peak, weights + leaving + sum(sums.values()) + costs.peak_bytes[steps[place]])
            sums |= costs.base_bytes.get(steps[place], {})
            peak = max(peak, weights + leaving + sum(sums.values()))
        leaving = sum(sums.values())
    return peak


def makespan_on_foot(schedule: Schedule, costs: StepCosts) -> float:
    """Of one device, action by action: copies from the host, to it, and work are three clocks."""
    order = schedule.orders[0].tolist()
    kinds = {number: kind for kind, number in NUMBER.items()}
    steps = [(kinds[kind], stage) for kind, stage, _ in order]
    windows = window_ranges([stage for _, stage, _ in order])
    reads = [set().union(*(costs.copied_bytes[steps[place]] for place in window)) for window in windows]
    sizes = {number: size for own in costs.copied_bytes.values() for number, size in own.items()}

    def seconds(numbers: set[int]) -> float:
        return sum(sizes[number] for number in numbers) / costs.host_bandwidth

    work, came, left, sums = 0.0, seconds(reads[0]), 0.0, 0
    there = set(reads[0])
    for index, window in enumerate(windows):
        following = reads[index + 1] if index + 1 < len(windows) else set()
        begins = max(work, came, left)
        left = max(left, work) + sums / costs.host_bandwidth
        came = max(came, work) + seconds(following - there)
        there = reads[index] | following
        work = begins + sum(costs.seconds[steps[place]] for place in window)
        sums = sum(dict(kv for place in window for kv in costs.base_bytes.get(steps[place], {}).items()).values())
    return max(left, work) + sums / costs.host_bandwidth


@st.composite
def models(draw: st.DrawFn) -> StepCosts:
    """Three stages that read some of four tensors, and have gradients of what they read."""
    tensors = {number: draw(st.integers(1, 50)) for number in range(4)}
    reads = [draw(st.sets(st.sampled_from(sorted(tensors)), min_size=1)) for _ in range(STAGES)]
    copied = {
        (kind, s): {n: tensors[n] for n in reads[s]}
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        for s in range(3)
    }
    base = {(ActionKind.BACKWARD, stage): copied[ActionKind.BACKWARD, stage] for stage in range(STAGES)}
    return StepCosts(
        seconds={step: draw(st.integers(1, 9)) for step in copied},
        peak_bytes={step: draw(st.integers(0, 20)) + sum(base.get(step, {}).values()) for step in copied},
        base_bytes=base,
        copied_bytes=copied,
        on_host=frozenset(tensors),
        host_bandwidth=draw(st.sampled_from([0.5, 4.0, 100.0])),
    )


@given(models(), st.integers(1, 3), st.sampled_from([stage_major, lambda n: gpipe(1, STAGES, n)]))
@settings(max_examples=150, deadline=None)
def test_bytes_and_seconds_are_those_of_a_walk(costs: StepCosts, microbatches: int, make) -> None:
    schedule = make(microbatches)
    timing = simulate_time(schedule, chain(STAGES), costs)
    assert timing.peak_bytes == (peak_on_foot(schedule, costs),)
    assert timing.makespan == pytest.approx(makespan_on_foot(schedule, costs))


def test_a_device_with_one_stage_has_its_weights_all_the_time() -> None:
    steps = [(kind, stage) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for stage in range(2)]
    costs = StepCosts(
        seconds=dict.fromkeys(steps, 1.0),
        copied_bytes={(kind, stage): {stage: 100} for kind, stage in steps},
        base_bytes={(ActionKind.BACKWARD, stage): {stage: 100} for stage in range(2)},
        on_host=frozenset({0, 1}),
        host_bandwidth=100.0,
    )
    timing = simulate_time(one_f_one_b(2, 2, 4), chain(2), costs)
    assert timing.peak_bytes == (200, 200) and timing.host_to_device_bytes == 200
    without = simulate_time(one_f_one_b(2, 2, 4), chain(2), StepCosts(seconds=dict.fromkeys(steps, 1.0))).makespan
    assert timing.makespan == without + 2  # weights come before, gradients leave after


def test_a_copy_is_slower_while_the_other_direction_is_busy() -> None:
    """Three windows of one action. The weights of the third come while gradients of the first leave."""
    steps = [(ActionKind.BACKWARD, stage) for stage in range(3)]
    graph = StageGraph({step: tuple(steps[:place]) for place, step in enumerate(steps)})
    costs = StepCosts(
        seconds=dict.fromkeys(steps, 1.0),
        copied_bytes={step: {stage: 10} for stage, step in enumerate(steps)},
        base_bytes={step: {stage: 10} for stage, step in enumerate(steps)},
        on_host=frozenset(range(3)),
        host_bandwidth=2.5,
    )
    schedule = Schedule.parse("0: B0.0 B1.0 B2.0")
    alone = simulate_time(schedule, graph, costs)
    both = simulate_time(schedule, graph, dataclasses.replace(costs, both_ways=0.5))

    def spans(timing: Timing) -> list[tuple[bool, float, float]]:
        return [(copy.to_host, copy.start, copy.end) for copy in sorted(timing.window_copies, key=lambda c: c.start)]

    weights = [(False, 0.0, 4.0), (False, 4.0, 8.0), (False, 8.0, 12.0)]
    assert sorted(spans(alone)) == [*weights, (True, 5.0, 9.0), (True, 9.0, 13.0), (True, 13.0, 17.0)]
    # The gradients that leave at 5 s have half of the rate until the last weights have come, at 12 s. Their memory is
    # free then only, so the last action begins later, too.
    assert sorted(spans(both)) == [*weights, (True, 5.0, 12.5), (True, 12.5, 16.5), (True, 16.5, 20.5)]
    assert (alone.makespan, both.makespan) == (17.0, 20.5)
