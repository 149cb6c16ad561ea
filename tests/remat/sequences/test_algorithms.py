"""Sequences of a chain: costs that were published, an exhaustive oracle, baselines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.compat.rotor import Backward, Chain, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Sequence
from roundpipe_fx.compat.rotor.nesting import Kept, Rerun, nest
from roundpipe_fx.remat.sequences.algorithms import ALGORITHMS, make_sequence, persistent

EQUAL = Chain((1,) * 10, (2,) * 10, (1,) * 11, (3,) * 11)


def test_published_costs() -> None:
    with pytest.raises(ValueError, match="chain of 10 layers fits 6 bytes"):
        persistent(EQUAL, 6)
    found = [persistent(EQUAL, limit) for limit in (7, 8, 9, 15)]
    assert [len(sequence) for sequence in found] == [66, 41, 36, 28]
    assert [sequence.peak(EQUAL) for sequence in found] == [7, 8, 9, 15]


def test_with_all_the_memory_there_is_nothing_runs_twice() -> None:
    sequence = persistent(EQUAL, 33)
    assert list(sequence) == list(ALGORITHMS["no-checkpoint"](EQUAL)) and sequence.peak(EQUAL) == 33
    assert sequence.seconds(EQUAL) == 30
    assert len(persistent(EQUAL, 32)) > 21


def sequences(first: int, last: int, n: int) -> Iterator[tuple[object, ...]]:
    """All persistent sequences of layers ``first`` to ``last``."""
    if first == n:
        yield (Loss(),)
        return
    if first == last:
        yield ForwardEnable(first), Backward(first)
    else:
        for rest in sequences(first + 1, last, n):
            yield (ForwardEnable(first), *rest, Backward(first))
    for until in range(first + 1, last + 1):
        passing = [ForwardNograd(index) for index in range(first + 1, until)]
        for rest in sequences(until, last, n):
            for again in sequences(first, until - 1, n):
                yield (ForwardCheck(first), *passing, *rest, *again)


small = st.integers(0, 4)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    n = draw(st.integers(1, 4))
    boundary = draw(st.lists(st.integers(1, 4), min_size=n + 1, max_size=n + 1))
    # What a layer saves has its result in it.
    saved = [0, *(size + draw(small) for size in boundary[1:])]
    numbers = [draw(st.lists(small, min_size=length, max_size=length)) for length in (n, n + 1, n, n + 1)]
    forward, backward, forward_temporary, backward_temporary = map(tuple, numbers)
    return Chain(
        forward=forward,
        backward=backward,
        boundary=tuple(boundary),
        saved=tuple(saved),
        forward_temporary=forward_temporary,
        backward_temporary=backward_temporary,
    )


@settings(max_examples=60, deadline=None)
@given(chains())
def test_equal_to_exhaustive_search(chain: Chain) -> None:
    n = chain.length
    every = [Sequence(operations) for operations in sequences(0, n, n)]  # type: ignore[arg-type]
    costs = [(sequence.peak(chain), sequence.seconds(chain)) for sequence in every]
    for limit in sorted({peak + more for peak, _ in costs for more in (-1, 0)}):
        fitting = [seconds for peak, seconds in costs if peak <= limit]
        if not fitting:
            with pytest.raises(ValueError):
                persistent(chain, limit)
            continue
        found = persistent(chain, limit)
        assert found.peak(chain) <= limit
        assert found.seconds(chain) == min(fitting)


@settings(max_examples=30, deadline=None)
@given(chains(), st.integers(2, 40))
def test_coarse_slots_never_exceed_the_limit(chain: Chain, slots: int) -> None:
    scaled = Chain(
        chain.forward, chain.backward, *(tuple(997 * size for size in sizes) for sizes in (chain.boundary, chain.saved))
    )
    limit = 997 * 20
    try:
        found = persistent(scaled, limit, slots)
    except ValueError:
        return
    assert found.peak(scaled) <= limit


def test_baselines() -> None:
    every, periodic = (make_sequence(EQUAL, 40, 500, name) for name in ("every-segment", "periodic"))
    assert len(every) == 31 and every.peak(EQUAL) == 15
    assert len(periodic) == 27 and periodic.peak(EQUAL) == 17
    checked = [operation.index for operation in periodic if isinstance(operation, ForwardCheck)]
    assert checked == [0, 3]
    with pytest.raises(ValueError, match="no-checkpoint sequence of this chain needs 33 bytes, and the limit is 32"):
        make_sequence(EQUAL, 32, 500, "no-checkpoint")
    with pytest.raises(ValueError, match=r"algo='best': valid values are 'persistent', 'no-checkpoint'"):
        make_sequence(EQUAL, 40, 500, "best")
    with pytest.raises(ValueError, match="not positive"):
        persistent(EQUAL, 0)


def test_sequences_and_chains_print() -> None:
    chain = Chain((1, 2), (3, 4, 5), (10, 20, 30), (0, 40, 50))
    sequence = persistent(chain, 131)
    assert str(sequence) == "6 operations (persistent for 131 bytes): Fc_0 Fe_1 L B_1 Fe_0 B_0"
    assert sequence.seconds(chain) == 1 + 2 + 5 + 4 + 1 + 3
    assert str(chain).splitlines()[1].split() == ["0", "1", "3", "10", "40", "0", "0"]
    assert (
        sequence[0] == ForwardCheck(0) and sequence[-1] == Backward(0) and list(sequence[2:4]) == [Loss(), Backward(1)]
    )


def test_sequences_that_do_not_work_name_the_operation() -> None:
    chain = Chain((1, 1), (1, 1), (1, 1, 1), (1, 1, 1))
    cases = {
        "operation 1, L: its input x_2 is not there": [ForwardCheck(0), Loss()],
        "operation 2, Fe_0: its input x_0 is not there": [ForwardNograd(0), ForwardCheck(1), ForwardEnable(0)],
        "operation 3, B_0: x̄_1 is not there": [ForwardCheck(0), ForwardCheck(1), Loss(), Backward(0)],
        "operation 0, B_7: the chain has layers 0 to 1": [Backward(7)],
        "does not end with the gradient": [ForwardCheck(0)],
    }
    for message, operations in cases.items():
        with pytest.raises(ValueError, match=message):
            Sequence(tuple(operations)).peak(chain)  # type: ignore[arg-type]


def test_chains_that_do_not_fit_themselves() -> None:
    with pytest.raises(ValueError, match="boundary has 2 entries; for 2 layers it must have 3"):
        Chain((1, 1), (1, 1), (1, 1), (1, 1, 1))
    with pytest.raises(ValueError, match="saved has a negative entry"):
        Chain((1,), (1,), (1, 1), (1, -1))


def test_nesting() -> None:
    sequence = persistent(EQUAL, 9)
    how = nest(sequence, 10)

    def layers(items: tuple[Kept | Rerun, ...]) -> list[int]:
        found = []
        for item in items:
            found += [item.index] if isinstance(item, Kept) else range(item.first, item.last + 1)
            if isinstance(item, Rerun):
                assert layers(item.inside) == list(range(item.first, item.last + 1))
        return found

    assert layers(how) == list(range(10))
    assert nest(ALGORITHMS["no-checkpoint"](EQUAL), 10) == tuple(map(Kept, range(10)))
    assert nest(ALGORITHMS["every-segment"](EQUAL), 10) == tuple(Rerun(i, i, (Kept(i),)) for i in range(10))
    with pytest.raises(ValueError, match="operation 1 of the sequence is Fe_0 where a persistent sequence"):
        nest(Sequence((ForwardEnable(0), ForwardEnable(0))), 2)
    with pytest.raises(ValueError, match="comes after its end"):
        nest(Sequence((ForwardEnable(0), Loss(), Backward(0), Backward(0))), 1)
