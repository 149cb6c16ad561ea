"""Values whose copies nothing waits for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from roundpipe_fx.compiler.hidden_copies import OffloadCandidate, choose_hidden_copies
from roundpipe_fx.ir.decisions import ValueOnHost

Calls = Sequence[tuple[str, float]]


def _value(stage: int, size: int = 1, forward: tuple[int, ...] = (), name: str = "") -> OffloadCandidate:
    name = name or f"v{stage}"
    readers = *(f"stage_{reader}_forward" for reader in forward), f"stage_{stage}_backward"
    return OffloadCandidate(value=name, name=name, bytes=size, maker=f"stage_{stage}_forward", readers=readers)


def _calls(stages: int, forward: float = 1.0, backward: float = 1.0) -> tuple[Calls, Calls]:
    return (
        [(f"stage_{stage}_forward", forward) for stage in range(stages)],
        [(f"stage_{stage}_backward", backward) for stage in reversed(range(stages))],
    )


def _copies(
    values: Sequence[OffloadCandidate],
    calls: tuple[Calls, Calls],
    byte_seconds: float = 1.0,
    enough: int = 10**9,
    host_limit: int = 10**9,
) -> list[ValueOnHost]:
    return choose_hidden_copies(values, *calls, range(len(calls[1])), byte_seconds, enough, host_limit)


def test_values_leave_and_return_beside_other_stages() -> None:
    copies = _copies([_value(stage) for stage in range(4)], _calls(4))
    assert [(c.name, c.freed, c.reloaded, c.back) for c in copies] == [
        ("v1", "stage_2_forward", "stage_2_backward", "stage_1_backward"),
        ("v0", "stage_1_forward", "stage_1_backward", "stage_0_backward"),
    ]


def test_what_the_link_has_no_time_for_stays() -> None:
    """A copy takes two stages: of four stages the first value is there and back, and the second not."""
    copies = _copies([_value(stage, 2) for stage in range(4)], _calls(4))
    assert [(c.name, c.freed, c.reloaded) for c in copies] == [("v0", "stage_2_forward", "stage_2_backward")]
    assert not _copies([_value(0, 8)], _calls(4))
    assert not _copies([_value(0, 2)], _calls(4, backward=0.5))


def test_no_more_leaves_than_is_asked_for() -> None:
    values = [_value(stage, 10) for stage in range(6)]
    assert {copy.name for copy in _copies(values, _calls(6), 0.01, enough=11)} == {"v0", "v1"}
    assert {copy.name for copy in _copies(values, _calls(6), 0.01, enough=11, host_limit=19)} == {"v0"}
    assert not _copies(values, _calls(6), 0.01, enough=1, host_limit=9)


def test_what_a_later_stage_reads_is_freed_behind_it() -> None:
    (copy,) = _copies([_value(0, forward=(2,))], _calls(5))
    assert copy.freed == "stage_2_forward"
    assert not _copies([_value(0, forward=(4,))], _calls(5, backward=0.0))  # away while nothing runs


@given(
    st.lists(st.tuples(st.floats(0.0, 4.0), st.floats(0.0, 8.0)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9), st.sets(st.integers(0, 7), max_size=2)), max_size=12),
    st.floats(0.01, 4.0),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_nothing_waits(
    seconds: list[tuple[float, float]],
    drawn: list[tuple[int, int, set[int]]],
    byte_seconds: float,
    enough: int,
    host_limit: int,
) -> None:
    """The programs are followed with a link that carries one copy after another, each way."""
    stages = len(seconds)
    forward = [(f"stage_{stage}_forward", before) for stage, (before, _) in enumerate(seconds)]
    backward = [(f"stage_{stage}_backward", after) for stage, (_, after) in reversed([*enumerate(seconds)])]
    values = [
        _value(stage, size, tuple(reader for reader in readers if stage < reader < stages), f"v{number}")
        for number, (stage, size, readers) in enumerate(drawn)
        if stage < stages
    ]
    copies = _copies(values, (forward, backward), byte_seconds, enough, host_limit)
    of = {value.name: value for value in values}
    there = {name: place for place, (name, _) in enumerate(forward)}
    back = {name: place for place, (name, _) in enumerate(backward)}

    ends = [*accumulate(after for _, after in forward)]
    link = 0.0
    for copy in sorted(copies, key=lambda copy: there[of[copy.name].maker]):
        link = max(link, ends[there[of[copy.name].maker]]) + of[copy.name].bytes * byte_seconds
        assert link <= ends[there[copy.freed]] + 1e-9
        assert there[copy.freed] > there[of[copy.name].maker]
        assert all(there[copy.freed] >= there[reader] for reader in of[copy.name].readers if reader in there)

    begins = [0.0, *accumulate(after for _, after in backward)]
    link = 0.0
    for copy in sorted(copies, key=lambda copy: back[copy.reloaded]):
        link = max(link, begins[back[copy.reloaded]]) + of[copy.name].bytes * byte_seconds
        assert link <= begins[back[copy.back]] + 1e-9
        assert back[copy.reloaded] < back[copy.back]
        assert copy.back in of[copy.name].readers
        assert there[copy.freed] < stages - 1 or back[copy.reloaded] > 0
    assert sum(of[copy.name].bytes for copy in copies) <= min(enough + 8, host_limit)
