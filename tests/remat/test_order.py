"""Orders against all permutations."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.analysis.liveness import Event, find_peak
from roundpipe_fx.remat.order import order_events


@st.composite
def events(draw: st.DrawFn) -> tuple[list[Event], dict[int, int], set[int]]:
    count = draw(st.integers(2, 6))
    sizes = {0: draw(st.integers(1, 5))}
    found = []
    for index in range(1, count + 1):
        sizes[index] = draw(st.integers(1, 9))
        reads = draw(st.lists(st.integers(0, index - 1), max_size=2, unique=True))
        inplace_candidates = tuple(draw(st.lists(st.sampled_from(reads), max_size=1))) if reads else ()
        inplace_candidates = tuple(s for s in inplace_candidates if sizes[s] == sizes[index])
        found.append(Event(index, reads, [index], inplace_candidates, "room", workspace=draw(st.integers(0, 3))))
    lasting = {index for index in range(1, count + 1) if draw(st.booleans())}
    return found, sizes, lasting


def _peaks(found: list[Event], sizes: dict[int, int], lasting: set[int]) -> list[int]:
    peaks = []
    for order in itertools.permutations(found):
        made = {0}
        if all(set(event.reads) <= made and not made.update(event.makes) for event in order):
            peaks.append(find_peak(order, sizes, {0}, lasting).bytes)
    return peaks


@settings(max_examples=150, deadline=None)
@given(events())
def test_finds_the_best_order_of_few_events(case: tuple[list[Event], dict[int, int], set[int]]) -> None:
    found, sizes, lasting = case
    best = min(_peaks(found, sizes, lasting))
    order = order_events(found, sizes, {0}, lasting, below=best + 1, width=50)
    assert order is not None and sorted(order) == list(range(len(found)))
    assert find_peak([found[p] for p in order], sizes, {0}, lasting).bytes == best
    assert order_events(found, sizes, {0}, lasting, below=best, width=50) is None


def test_what_frees_memory_runs_first() -> None:
    # 1 and 2 are large; 3 frees 1, so it should not wait for 2.
    chain = [Event("a", [0], [1]), Event("b", [0], [2]), Event("c", [1], [3]), Event("d", [2], [4])]
    sizes = {0: 1, 1: 10, 2: 10, 3: 1, 4: 1}
    known = find_peak(chain, sizes, {0}, {3, 4}).bytes
    order = order_events(chain, sizes, {0}, {3, 4}, known)
    assert order is not None  # the one that is made first is read before the other is made
    assert find_peak([chain[p] for p in order], sizes, {0}, {3, 4}).bytes == 12 < known
