"""The chain solver against exhaustive search: Dijkstra over everything that can be stored."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.remat.chain import ChainStage, ChainStageOption, Decision, SegmentChain
from roundpipe_fx.remat.solve_chain import solve_chain


def rotor_chain(forward: list[int], saved: list[int], boundary: list[int]) -> SegmentChain:
    """rotor's problem: one option per stage, which saves all. ``boundary[i]``: bytes that enter stage i."""
    count = len(forward)
    live_across = np.zeros((count, count), dtype=np.int64)
    for first, until in itertools.combinations(range(count), 2):
        live_across[first, until] = boundary[until]
    stages = []
    for index in range(count):
        leaving = boundary[index + 1] if index + 1 < count else 0
        held = saved[index] + leaving
        option = ChainStageOption(held, 0.0, held, saved[index])
        unsaved_options = ChainStageOption(0, float(forward[index]), saved[index], saved[index])
        stages.append(
            ChainStage(
                seconds=float(forward[index]), forward=leaving, options=(option,), unsaved_options=(unsaved_options,)
            )
        )
    return SegmentChain(tuple(stages), live_across)


def exhaustive(forward: list[int], saved: list[int], boundary: list[int], limit: int) -> float:
    """Least seconds of repeated forwards, over every order of running, keeping and dropping.

    A state is: how many backwards remain, which inputs are stored, which stages' values are stored, and where the
    forward stands. What was kept is dropped only when its backward is done, as in persistent schedules.
    """
    count = len(forward)
    size = [0, *boundary[1:count], 0]
    start = (count, frozenset([0]), frozenset(), 0)
    best = {start: 0.0}
    queue = [(0.0, 0, start)]
    numbers = itertools.count(1)

    def held(inputs: frozenset[int], values: frozenset[int]) -> int:
        return sum(size[i] for i in inputs) + sum(saved[i] for i in values)

    def push(state: tuple, cost: float) -> None:
        if cost < best.get(state, np.inf):
            best[state] = cost
            heapq.heappush(queue, (cost, next(numbers), state))

    while queue:
        cost, _, (remaining, inputs, values, at) = heapq.heappop(queue)
        if cost > best[remaining, inputs, values, at]:
            continue
        if remaining == 0:
            return cost - sum(forward)  # the first forward is no recomputation
        last = remaining - 1
        if last in values and at in (remaining, last):
            push((last, frozenset(i for i in inputs if i < last or i == 0), values - {last}, -1), cost)
            continue
        if at == -1:  # go back to some stored input
            for place in inputs:
                if place <= last:
                    push((remaining, inputs, values, place), cost)
            continue
        if at > last:
            continue
        # Run stage ``at``: keep its values, or keep its result only, or keep the result as a stored input.
        kept_input = at in inputs
        moving = 0 if kept_input else size[at]
        onward = size[at + 1] if at < last else 0
        base = held(inputs, values) + moving
        if at not in values:
            if base + saved[at] + onward <= limit and (kept_input or at == 0):
                stored = inputs | ({at + 1} if at < last else set())
                push((remaining, stored, values | {at}, at + 1), cost + forward[at])
            if at < last and base + onward <= limit:
                push((remaining, inputs, values, at + 1), cost + forward[at])
                push((remaining, inputs | {at + 1}, values, at + 1), cost + forward[at])
    return np.inf


small = st.lists(st.integers(1, 4), min_size=2, max_size=4)


@settings(max_examples=60, deadline=None)
@given(small, st.data())
def test_contains_rotors_problem(forward: list[int], data: st.DataObject) -> None:
    count = len(forward)
    sizes = st.lists(st.integers(1, 4), min_size=count, max_size=count)
    boundary = data.draw(sizes)
    saved = [data.draw(st.integers(1, 6)) for _ in range(count)]
    limit = sum(saved) + sum(boundary)
    solution = solve_chain(rotor_chain(forward, saved, boundary), limit, limit)
    for memory in range(1, limit + 1):
        assert solution.seconds[memory] == exhaustive(forward, saved, boundary, memory), memory


def test_more_memory_never_costs_more_and_the_decisions_reach_the_cost() -> None:
    chain = rotor_chain([1] * 8, [3] * 8, [1] * 8)
    solution = solve_chain(chain, 40, 40)
    finite = solution.seconds[np.isfinite(solution.seconds)]
    assert (np.diff(finite) <= 0).all() and finite[-1] == 0 and finite[0] > 0
    assert np.isfinite(solution.seconds[-1])
    for slots in np.flatnonzero(np.isfinite(solution.seconds)):
        assert _cost(chain, solution.decisions(int(slots))) == solution.seconds[slots]


def _cost(chain: SegmentChain, decisions: list[Decision]) -> float:
    total = 0.0
    for decision in decisions:
        stage = chain.stages[decision.stage]
        if decision.unsaved_option is not None:
            total += stage.unsaved_options[decision.unsaved_option].seconds
        elif decision.option is not None:
            total += stage.options[decision.option].seconds + (stage.seconds if decision.before is not None else 0.0)
        elif decision.before is not None:
            total += sum(chain.stages[i].seconds for i in range(decision.stage, decision.until))
    return total


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 12), st.integers(1, 50), st.integers(1, 20), st.integers(0, 15), st.integers(20, 120))
def test_decisions_keep_to_the_memory_though_it_is_rounded(
    count: int, saved: int, boundary: int, gradient: int, slots: int
) -> None:
    chain = rotor_chain([1] * count, [saved] * count, [boundary] * count)
    stages = tuple(replace(stage, resident=gradient * (count - index)) for index, stage in enumerate(chain.stages))
    chain = SegmentChain(stages, chain.live_across)
    limit = count * (saved + boundary + gradient)
    solution = solve_chain(chain, limit, slots)
    for memory in np.flatnonzero(np.isfinite(solution.seconds)):
        decisions = solution.decisions(int(memory))
        # Everything that is held and every repetition is rounded, to half a slot each.
        assert chain.needed(decisions) <= (memory + 8 + len(decisions)) * solution.slot
        assert _cost(chain, decisions) <= solution.seconds[memory] + len(decisions)


def test_without_nesting_nothing_is_made_again_for_later_links() -> None:
    chain = rotor_chain([1] * 6, [3] * 6, [1] * 6)
    solution = solve_chain(chain, 40, 40, nested=False)
    assert all(decision.before is None for decision in solution.decisions(40))
    nested = solve_chain(chain, 40, 40)
    assert np.flatnonzero(np.isfinite(nested.seconds))[0] < np.flatnonzero(np.isfinite(solution.seconds))[0]


def test_an_option_in_between_is_taken_where_it_fits() -> None:
    def stage(last: bool) -> ChainStage:
        leaving = 0 if last else 1
        options = tuple(
            ChainStageOption(held + leaving, cost, held + leaving, 4) for held, cost in ((4, 0.0), (2, 1.0))
        )
        return ChainStage(
            seconds=3.0, forward=leaving, options=options, unsaved_options=(ChainStageOption(0, 3.0, 0, 4),)
        )

    live_across = np.array([[0, 1], [0, 0]])
    solution = solve_chain(SegmentChain((stage(False), stage(True)), live_across), 12, 12)
    assert solution.seconds[9] == 0.0  # both keep all
    assert solution.seconds[7] == 1.0  # the first keeps half
    assert solution.seconds[5] == 3.0  # the first keeps nothing


@pytest.mark.parametrize("count", [1, 2])
def test_shortest_chains(count: int) -> None:
    solution = solve_chain(rotor_chain([1] * count, [2] * count, [1] * count), 10, 10)
    assert solution.seconds[10] == 0.0 and np.isinf(solution.seconds[0])
