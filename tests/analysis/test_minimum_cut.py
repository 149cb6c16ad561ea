"""Minimum cuts against all cuts."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from roundpipe_fx.analysis.minimum_cut import CAPACITY, SINK, SOURCE, UNCUTTABLE, choose_unit, minimum_cut

VERTICES = 6
vertices = st.integers(0, VERTICES - 1)
pairs = st.tuples(vertices, vertices).filter(lambda pair: pair[0] != pair[1])
networks = st.lists(st.tuples(pairs, st.integers(0, 9)), min_size=1, max_size=14)


def _cuts(arcs: list[tuple[int, int, int]]) -> list[tuple[int, int, set[int]]]:
    """Every cut: its cost, how many vertices are on the source's side, and which."""
    found = []
    for count in range(VERTICES - 1):
        for others in itertools.combinations(range(2, VERTICES), count):
            side = {SOURCE, *others}
            found.append((sum(cost for a, b, cost in arcs if a in side and b not in side), count, side))
    return found


@given(networks)
def test_no_cut_costs_less_or_has_fewer_vertices(network: list) -> None:
    arcs = [(start, end, cost) for (start, end), cost in network]
    cost, side = minimum_cut(arcs, VERTICES)
    least = min(own for own, _, _ in _cuts(arcs))
    assert cost == least
    assert side == min((count, own) for own_cost, count, own in _cuts(arcs) if own_cost == least)[1]


def test_what_cannot_be_cut_is_not_however_often_it_is_said() -> None:
    arcs = [(SOURCE, 2, 3), (2, 3, UNCUTTABLE), (2, 3, UNCUTTABLE), (3, SINK, 5)]
    assert minimum_cut(arcs, 4) == (3, {SOURCE})


def test_sizes_are_whole_in_their_unit_unless_there_are_too_many() -> None:
    assert choose_unit([12, 8, 20]) == 4
    assert choose_unit([]) == choose_unit([0]) == 1
    unit = choose_unit([4 * CAPACITY, 4, 4 * CAPACITY])
    assert unit % 4 == 0
    assert 8 * CAPACITY / unit <= CAPACITY < 8 * CAPACITY / (unit - 4) + 8
