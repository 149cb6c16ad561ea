from __future__ import annotations

from roundpipe_fx.analysis.liveness import Event, find_peak

SIZES = {0: 10, 1: 20, 2: 5, 3: 20}


def test_results_and_operands_live_side_by_side_and_die_at_their_last_use() -> None:
    events = [Event("a", [], [0]), Event("b", [0], [1]), Event("c", [1], [2])]
    peak = find_peak(events, SIZES, list_live=True)
    assert (peak.bytes, peak.position, peak.live) == (30, 1, ((1, 20), (0, 10)))


def test_what_somebody_holds_lives_to_the_end() -> None:
    events = [Event("a", [], [0]), Event("b", [0], [1]), Event("c", [1], [2])]
    assert find_peak(events, SIZES, lasting={0}).bytes == 35


def test_a_result_takes_the_place_of_an_operand_that_dies_in_the_same_room() -> None:
    same = [Event("a", [], [1], reuse_scope="x"), Event("b", [1], [3], (1,), "x")]
    other = [Event("a", [], [1], reuse_scope="x"), Event("b", [1], [3], (1,), "y")]
    assert find_peak(same, SIZES).bytes == 20
    assert find_peak(other, SIZES).bytes == 40
    assert find_peak([*same, Event("c", [1], [])], SIZES).bytes == 40  # it does not die


def test_what_was_there_before_counts_until_it_is_read_for_the_last_time() -> None:
    events = [Event("a", [0], [2]), Event("b", [], [1])]
    assert find_peak(events, SIZES, before={0}).bytes == 20
    assert find_peak(events, SIZES, before={0}, lasting={0}).bytes == 30


def test_scratch_counts_while_an_event_runs() -> None:
    assert find_peak([Event("a", [], [0], workspace=7), Event("b", [0], [2])], SIZES).bytes == 17


def test_arrivals_count_from_when_they_come() -> None:
    events = [Event("a", [], [1]), Event("b", [0], [2])]
    assert find_peak(events, SIZES, arriving={1: [0]}).bytes == 20
    assert find_peak(events, SIZES, lasting={1}, arriving={1: [0]}).bytes == 35
