"""Values that leave for the host and come back: what leaves is enough and no more, and bytes and seconds are those of a
walk through the actions, one after another."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from roundpipe_fx.runtime.value_offloading import OffloadSteps, offload_steps_of
from roundpipe_fx.schedules import ActionKind, Held, Schedule, StepCosts, chain, gpipe, round_robin, slot_chain
from roundpipe_fx.schedules import simulate_time as simulate
from roundpipe_fx.schedules.choose_offloads import OffloadRule, choose_offloads, offloads_within
from roundpipe_fx.schedules.offloads import Offload, buffer_bytes, offloads_at_distance
from roundpipe_fx.schedules.stage_graph import StageGraph
from roundpipe_fx.schedules.timetable import KINDS

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


@st.composite
def steps(draw: st.DrawFn) -> tuple[Schedule, StageGraph, StepCosts]:
    """A step on one device with values of several sizes between its stage actions, some of which must stay."""
    count, microbatches = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    if draw(st.booleans()):
        schedule, graph = gpipe(1, count, microbatches), chain(count)
    else:
        schedule, graph = round_robin(1, 1, count + 1, microbatches, None, True), slot_chain(1, count + 1)
    order = list(graph.steps)
    forwards = [step for step in order if step[0] is F]
    backwards = [step for step in order if step[0] is B]
    if graph.has(B, 0):
        backwards.reverse()
    order = [*forwards, *backwards]
    held = []
    for number in range(draw(st.integers(1, 6))):
        maker = draw(st.integers(0, len(order) - 2))
        readers = draw(st.sets(st.integers(maker + 1, len(order) - 1), min_size=1, max_size=3))
        size = draw(st.integers(1, 20))
        may_leave = draw(st.sampled_from([True, True, False]))
        readers_of = tuple(order[reader] for reader in sorted(readers))
        held.append(Held(size, order[maker], readers_of, values=((number, size),) if may_leave else ()))
    weights = {step: {step[1]: draw(st.integers(1, 30))} for step in order}
    weights = {
        step: {stage: weights[F if graph.has(F, step[1]) else B, step[1]][step[1]] for stage in own}
        for step, own in weights.items()
    }
    costs = StepCosts(
        seconds={step: draw(st.integers(1, 9)) for step in order},
        peak_bytes={step: draw(st.integers(0, 9)) for step in order},
        held=tuple(held),
        copied_bytes=weights,
        base_bytes={step: weights[step] for step in backwards if draw(st.booleans())},
        on_host=frozenset(range(count + 1)),
        host_bandwidth=draw(st.sampled_from([1.0, 5.0, 100.0])),
    )
    return schedule, graph, costs


distances = st.integers(0, 3)


@given(steps(), distances, st.integers(0, 200), st.booleans())
@settings(max_examples=250, deadline=None)
@pytest.mark.long
def test_what_leaves_brings_the_device_within_the_limit_if_anything_can(
    step, distance: int, limit: int, in_time: bool
) -> None:
    schedule, graph, costs = step
    present = simulate(schedule, graph, costs)
    chosen = offloads_within(present, costs, {}, OffloadRule(limit, distance, in_time))
    timing = simulate(schedule, graph, costs, offloads=chosen)
    everything, _ = offloads_at_distance(schedule, costs, {}, distance)
    least = simulate(schedule, graph, costs, offloads=everything)
    assert timing.peak_bytes[0] <= max(limit, least.peak_bytes[0])
    assert chosen or present.peak_bytes[0] <= limit or not everything or least.peak_bytes == present.peak_bytes
    if present.peak_bytes[0] <= limit:
        assert not chosen and timing.makespan == present.makespan
    for own in chosen:  # all that leaves is needed
        without = [other for other in chosen if other is not own]
        higher = simulate(schedule, graph, costs, offloads=without).action_bytes[0]
        assert (higher > np.maximum(timing.action_bytes[0], limit)).any()


@given(steps(), distances)
@settings(max_examples=150, deadline=None)
def test_a_value_is_away_between_two_readers_and_back_before_it_is_read(step, distance: int) -> None:
    schedule, _, costs = step
    actions = schedule.actions(0)
    seen = set()
    may, must = offloads_at_distance(schedule, costs, {}, distance)
    assert not must
    for own in may:
        ((number, _),) = own.values
        held = next(held for held in costs.held if held.values == own.values)
        users = {held.maker, *held.readers}
        uses = [p for p, action in enumerate(actions) if action.microbatch == own.microbatch and action.step in users]
        assert own.leaves - 1 in uses and own.back in uses
        assert not any(own.leaves - 1 < place < own.back for place in uses)
        assert own.freed - own.leaves == own.back - own.reloads == distance and own.freed < own.reloads
        assert (number, own.microbatch, own.leaves) not in seen
        seen.add((number, own.microbatch, own.leaves))


@given(steps(), distances)
@settings(max_examples=150, deadline=None)
def test_each_copy_belongs_to_one_half_of_a_step_with_a_loss_outside(step, distance: int) -> None:
    schedule, _, costs = step
    assume(schedule.name == "gpipe")
    halves = schedule.halves()
    forwards, backwards = halves.only(F), halves.only(*KINDS[1:])
    turn = forwards.size
    may, _ = offloads_at_distance(halves, costs, {}, distance)
    in_one_run, _ = offloads_at_distance(schedule, costs, {}, distance)
    assert set(may) <= set(in_one_run) and (distance or may == in_one_run)
    for own in may:
        assert own.back < turn or own.leaves > turn or own.freed <= turn <= own.reloads
    done: dict[Offload, list[tuple[str, int]]] = {own: [] for own in may}
    for part, kinds, start in ((forwards, (F,), 0), (backwards, KINDS[1:], turn)):
        instructions: Any = [[SimpleNamespace(action=action) for action in part.actions(0)]]
        for place, of_place in offload_steps_of(halves, instructions, may, kinds)[0].items():
            for name in OffloadSteps.__slots__:
                for own in getattr(of_place, name):
                    done[own].append((name, start + place))
    for own, names in done.items():
        assert dict(names) == {name: getattr(own, name) for name in OffloadSteps.__slots__} and len(names) == 4


@given(steps(), distances, st.integers(0, 200), st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_what_must_leave_does_under_every_limit_and_the_others_for_what_is_left(
    step, distance: int, limit: int, in_time: bool, data: st.DataObject
) -> None:
    schedule, graph, costs = step
    freely = costs
    wanted = {own.values for own in costs.held if own.values and data.draw(st.booleans())}
    costs = dataclasses.replace(costs, wanted_on_host=frozenset(number for ((number, _),) in wanted))
    _, must = offloads_at_distance(schedule, costs, {}, distance)
    assert {own.values for own in must} <= wanted
    present = simulate(schedule, graph, costs)
    assert offloads_within(present, costs, {}, OffloadRule(2**40, distance, in_time)) == sorted(must, key=_place)
    chosen = offloads_within(present, costs, {}, OffloadRule(limit, distance, in_time))
    assert set(must) <= set(chosen)
    timing = simulate(schedule, graph, costs, offloads=chosen)
    assert timing.peak_bytes[0] <= max(limit, present.peak_bytes[0])
    nearest, _ = offloads_at_distance(schedule, freely, {}, 0)
    away = [(own.values, own.microbatch, own.leaves, own.back) for own in must]
    kinds = [action.kind for action in schedule.actions(0)]
    assert sorted(away) == sorted(
        (own.values, own.microbatch, own.leaves, own.back)
        for own in nearest
        if own.values in wanted and kinds[own.leaves - 1] is ActionKind.FORWARD is not kinds[own.back]
    )


def _place(own: Offload) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
    return own.device, own.leaves, own.microbatch, own.values


@given(steps(), distances, st.integers(0, 200))
@settings(max_examples=150, deadline=None)
def test_bytes_and_seconds_are_those_of_a_walk(step, distance: int, limit: int) -> None:
    schedule, graph, costs = step
    chosen = offloads_within(simulate(schedule, graph, costs), costs, {}, OffloadRule(limit, distance))
    # Actions need so much that what is there between them does not count.
    costs = dataclasses.replace(costs, peak_bytes=dict.fromkeys(costs.seconds, 1000))
    timing = simulate(schedule, graph, costs, offloads=chosen)
    assert timing.makespan == pytest.approx(_makespan_on_foot(schedule, costs, chosen))
    without = simulate(schedule, graph, dataclasses.replace(costs, held=()))
    values = _values_on_foot(schedule, costs, chosen)
    assert (timing.action_bytes[0] - without.action_bytes[0]).tolist() == values


def test_what_leaves_in_time_keeps_no_device_waiting() -> None:
    # Four forward slots of 8 s, a fused one, and four backward slots. In 8 s the link carries 8 of 12 bytes.
    schedule, graph = round_robin(1, 4, 9, 4, None, True), slot_chain(4, 9)
    held = tuple(Held(12, (F, stage), ((B, 8 - stage),), values=((stage, 12),)) for stage in range(4))
    seconds = {step: 8.0 if step[0] is F else 16.0 for step in graph.steps}
    costs = StepCosts(seconds=seconds, held=held, on_host=frozenset(), host_bandwidth=1.0)
    present = simulate(schedule, graph, costs)
    assert present.peak_bytes[0] == 16 * 12
    longest, in_time = (
        simulate(schedule, graph, costs, offloads=offloads_within(present, costs, {}, OffloadRule(96, 2, in_time)))
        for in_time in (False, True)
    )
    for timing in (longest, in_time):
        assert timing.peak_bytes[0] <= 96 and sum(own.bytes for own in timing.offloads) == 96
    assert present.makespan == in_time.makespan < longest.makespan


def _values_on_foot(schedule: Schedule, costs: StepCosts, chosen: list[Offload]) -> list[int]:
    """Bytes of values on the device during each action, from before it, without those that it makes."""
    actions = schedule.actions(0)
    there: dict[tuple[int, int], int] = {}
    found = []
    for place, action in enumerate(actions):
        for own in chosen:
            if own.freed == place:
                del there[own.values[0][0], own.microbatch]
            if own.reloads == place:
                there[own.values[0][0], own.microbatch] = own.bytes
        found.append(sum(there.values()))
        for number, held in enumerate(costs.held):
            key = held.values[0][0] if held.values else 100 + number, action.microbatch
            if held.maker == action.step:
                there[key] = held.bytes
            later = {(own.step, own.microbatch) for own in actions[place + 1 :]}
            if key in there and not any((reader, action.microbatch) in later for reader in held.readers):
                del there[key]
    return found


def _makespan_on_foot(schedule: Schedule, costs: StepCosts, chosen: list[Offload]) -> float:
    """Of one device: its work, and the copies in each direction, are three clocks."""
    actions = schedule.actions(0)
    starts = [p for p in range(len(actions)) if not p or actions[p].stage != actions[p - 1].stage]
    windows = [range(a, b) for a, b in itertools.pairwise([*starts, len(actions)])]

    def weights(index: int) -> dict[int, int]:
        window = windows[index] if index < len(windows) else ()
        return {number: size for p in window for number, size in costs.copied_bytes[actions[p].step].items()}

    def gradients(index: int) -> float:
        sums = [costs.base_bytes.get(actions[p].step, {}) for p in windows[index]]
        return sum({number: size for own in sums for number, size in own.items()}.values()) / costs.host_bandwidth

    work = to_host = from_host = tensors = gone = 0.0
    ends: dict[tuple[str, Offload], float] = {}
    there: set[int] = set()
    for place, action in enumerate(actions):
        for own in (own for own in chosen if own.leaves == place):
            to_host = ends["out", own] = max(to_host, work) + own.bytes / costs.host_bandwidth
        now = work
        if place in starts:
            index = starts.index(place)
            if not index:
                from_host = tensors = sum(weights(0).values()) / costs.host_bandwidth
                there = set(weights(0))
            issued = now
            now = max(now, tensors, gone)
            gone = 0.0
            if index and gradients(index - 1):
                to_host = gone = max(to_host, issued) + gradients(index - 1)
            following = weights(index + 1)
            new = sum(size for number, size in following.items() if number not in there)
            from_host = tensors = max(from_host, issued) + new / costs.host_bandwidth
            there = {*weights(index), *following}
        now = max([now, *(ends["out", own] for own in chosen if own.freed == place)])
        for own in (own for own in chosen if own.reloads == place):
            from_host = ends["in", own] = max(from_host, now) + own.bytes / costs.host_bandwidth
        now = max([now, *(ends["in", own] for own in chosen if own.back == place)])
        work = now + costs.seconds[action.step]
    return max(to_host, work) + gradients(len(windows) - 1)


def _offload(batch: int, values: tuple[tuple[int, int], ...], *places: int) -> Offload:
    leaves, freed, reloads, back = places
    return Offload(device=0, microbatch=batch, values=values, leaves=leaves, freed=freed, reloads=reloads, back=back)


@st.composite
def coverings(draw: st.DrawFn) -> tuple[list[Offload], np.ndarray, int]:
    """Intervals of one size over a few positions, with the bytes that are there."""
    length = draw(st.integers(3, 7))
    candidates = []
    for number in range(draw(st.integers(0, 7))):
        start = draw(st.integers(1, length - 2))
        end = draw(st.integers(start + 1, length - 1))
        candidates.append(_offload(number, ((number, 10),), start, start, end, end))
    during = np.full(length, draw(st.integers(0, 20)))
    for own in candidates:
        during[own.freed : own.reloads] += own.bytes
    return candidates, during, draw(st.integers(0, 60))


@given(coverings())
@settings(max_examples=200, deadline=None)
def test_no_fewer_values_of_one_size_would_do(covering: tuple[list[Offload], np.ndarray, int]) -> None:
    candidates, during, limit = covering

    def fits(chosen: tuple[Offload, ...] | list[Offload]) -> bool:
        left = during.copy()
        for own in chosen:
            left[own.freed : own.reloads] -= own.bytes
        return bool((left <= limit).all())

    chosen = choose_offloads(candidates, [during], limit)
    fewest = next(
        (size for size in range(len(candidates) + 1) if any(map(fits, itertools.combinations(candidates, size)))), None
    )
    assert fits(chosen) == (fewest is not None)
    assert fewest is None or len(chosen) == fewest


def test_buffers_serve_one_value_after_another() -> None:
    one, two = _offload(0, ((0, 12),), 1, 2, 3, 4), _offload(1, ((0, 12),), 5, 5, 6, 7)
    assert buffer_bytes([one, two], [8], int) == [12]
    assert buffer_bytes([one, two], [8], lambda size: size + 4) == [16]
    assert buffer_bytes([one, dataclasses.replace(two, leaves=4)], [8], int) == [24]
    assert buffer_bytes([one, dataclasses.replace(two, values=((0, 13),))], [8], int) == [25]
    assert buffer_bytes([one, dataclasses.replace(two, device=1)], [8, 8], int) == [12, 12]
    assert buffer_bytes([], [8], int) == [0]
