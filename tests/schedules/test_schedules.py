from __future__ import annotations

import expecttest
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.schedules import (
    Action,
    ActionKind,
    Held,
    Schedule,
    StageAction,
    StageGraph,
    StepCosts,
    chain,
    gpipe,
    interleaved,
    one_f_one_b,
    round_robin,
    simulate_time,
    slot_chain,
    validate,
    with_recompute,
    with_transfers,
    zero_bubble,
)
from tests.schedules.paper import ends_on_paper

_F = ActionKind.FORWARD


def costs_of(graph: StageGraph, **seconds: float) -> StepCosts:
    return StepCosts(seconds={step: seconds[step[0].value] for step in graph.steps})


def test_text_of_small_schedules() -> None:
    shown = "\n\n".join(
        f"{schedule.name}\n{schedule}"
        for schedule in (
            gpipe(2, 2, 3),
            one_f_one_b(3, 3, 4),
            one_f_one_b(2, 4, 2),
            interleaved(2, 4, 2),
            zero_bubble(3, 3, 4),
            round_robin(2, 1, 4, 2),
        )
    )
    expecttest.assert_expected_inline(
        shown,
        """\
gpipe
0: F0.0 F0.1 F0.2 B0.0 B0.1 B0.2
1: F1.0 F1.1 F1.2 B1.0 B1.1 B1.2

1f1b
0: F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3
1: F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3
2: F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3

1f1b
0: F0.0 F1.0 F0.1 F1.1 B1.0 B0.0 B1.1 B0.1
1: F2.0 F3.0 B3.0 B2.0 F2.1 F3.1 B3.1 B2.1

interleaved
0: F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1
1: F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1

zero_bubble
0: F0.0 F0.1 F0.2 I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3
1: F1.0 F1.1 I1.0 F1.2 I1.1 W1.0 F1.3 I1.2 W1.1 I1.3 W1.2 W1.3
2: F2.0 I2.0 F2.1 I2.1 F2.2 I2.2 W2.0 F2.3 I2.3 W2.1 W2.2 W2.3

roundpipe
0: F0.0 F0.1 B2.0 B2.1
1: F1.0 B1.0 F1.1 B1.1 B3.0 B3.1""",
    )


def test_text_reads_back() -> None:
    made = zero_bubble(3, 3, 4)
    assert Schedule.parse(str(made)) == made
    assert Schedule.parse("F0.0 B0.0\n# a comment\nF1.0 B1.0").devices == 2
    assert Schedule.of("given", [made.actions(device) for device in range(3)]) == made
    assert hash(Schedule.parse(str(made))) == hash(made)
    assert made != gpipe(3, 3, 4)


@pytest.mark.parametrize("text", ["X0.1", "F0", "F0.1.2", "S:F0.1>1"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"action|transfers"):
        Schedule.parse(f"0: {text}")


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_bubble_has_the_closed_form(make, devices: int, microbatches: int) -> None:
    graph = chain(devices)
    timing = simulate_time(make(devices, devices, microbatches), graph, costs_of(graph, F=1.0, B=2.0))
    assert timing.bubble == pytest.approx((devices - 1) / (microbatches + devices - 1), abs=1e-12)
    assert timing.makespan == pytest.approx(3 * (microbatches + devices - 1))


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaving_divides_the_bubble(devices: int, chunks: int) -> None:
    microbatches = 2 * devices
    graph = chain(devices * chunks)
    timing = simulate_time(interleaved(devices, devices * chunks, microbatches), graph, costs_of(graph, F=1.0, B=2.0))
    work = 3.0 * microbatches * chunks
    assert timing.makespan == pytest.approx(work + 3.0 * (devices - 1))
    assert timing.bubble == pytest.approx(3.0 * (devices - 1) / (work + 3.0 * (devices - 1)))


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_zero_bubble_hides_all_but_the_rest(devices: int, more: int) -> None:
    """(p - 1)(F + I - W), as the paper has it for ZB-H1."""
    microbatches = devices + more
    graph = chain(devices, split=True)
    timing = simulate_time(zero_bubble(devices, devices, microbatches), graph, costs_of(graph, F=1.0, I=1.0, W=1.0))
    assert timing.makespan == pytest.approx(3.0 * microbatches + (devices - 1))


@pytest.mark.parametrize("devices", [2, 4])
def test_round_robin_waits_only_at_the_ends(devices: int) -> None:
    fused, slots, microbatches = devices - 1, 2 * devices, 3 * devices
    graph = slot_chain(fused, slots)
    seconds = {step: (0.5 if step[1] == fused else 1.0) for step in graph.steps}
    timing = simulate_time(round_robin(devices, fused, slots, microbatches), graph, StepCosts(seconds=seconds))
    assert timing.makespan == pytest.approx(2.0 * microbatches + devices - 1)


def test_1f1b_holds_as_many_microbatches_as_stages_follow() -> None:
    devices, microbatches = 4, 12
    graph = chain(devices)
    held = tuple(Held(10, (_F, stage), ((ActionKind.BACKWARD, stage),)) for stage in range(devices))
    peaks = {step: (10 if step[0] is _F else 3) for step in graph.steps}
    costs = StepCosts(seconds=dict.fromkeys(graph.steps, 1.0), held=held, peak_bytes=peaks)
    assert simulate_time(one_f_one_b(devices, devices, microbatches), graph, costs).peak_bytes == (43, 33, 23, 13)
    assert simulate_time(gpipe(devices, devices, microbatches), graph, costs).peak_bytes == (123,) * 4


def test_a_smaller_last_group_holds_no_more_than_a_whole_one() -> None:
    devices, stages = 4, 8
    graph = chain(stages)
    held = tuple(Held(10, (_F, stage), ((ActionKind.BACKWARD, stage),)) for stage in range(stages))
    costs = StepCosts(seconds=dict.fromkeys(graph.steps, 1.0), held=held)
    peaks = {
        count: max(simulate_time(interleaved(devices, stages, count), graph, costs).peak_bytes) for count in (9, 12)
    }
    assert peaks[9] <= peaks[12] < 9 * 2 * 10


def test_what_arrives_early_is_held_until_it_is_read() -> None:
    """Stage 1 takes ten times as long, so what stage 0 has made waits there."""
    graph = chain(2, training=False)
    seconds = {(_F, 0): 1.0, (_F, 1): 10.0}
    costs = StepCosts(seconds=seconds, held=(Held(7, (_F, 0), ((_F, 1),)),), peak_bytes={(_F, 0): 7, (_F, 1): 1})
    timing = simulate_time(gpipe(2, 2, 4).restricted(graph), graph, costs)
    assert timing.peak_bytes == (7, 4 * 7 + 1)  # all four have arrived while the first is read


@given(
    devices=st.integers(1, 4),
    microbatches=st.integers(1, 5),
    which=st.sampled_from([gpipe, one_f_one_b]),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_no_timing_needs_more_than_the_predicted_peaks(devices, microbatches, which, data: st.DataObject) -> None:
    """Whatever the steps take, what a device holds while it runs an action is within its peak."""
    graph = chain(devices)
    schedule = which(devices, devices, microbatches)
    held = [Held(data.draw(st.integers(1, 9)), (_F, s), ((ActionKind.BACKWARD, s),)) for s in range(devices)]
    held += [Held(data.draw(st.integers(1, 9)), (_F, s), ((_F, s + 1),)) for s in range(devices - 1)]
    held += [
        Held(data.draw(st.integers(1, 9)), (ActionKind.BACKWARD, s + 1), ((ActionKind.BACKWARD, s),))
        for s in range(devices - 1)
    ]
    peaks = set()
    for _ in range(3):
        seconds = {step: data.draw(st.floats(0.1, 9.0)) for step in graph.steps}
        costs = StepCosts(seconds=seconds, held=tuple(held))
        predicted = simulate_time(schedule, graph, costs).peak_bytes
        peaks.add(predicted)
        ends = ends_on_paper(schedule, graph, costs)
        where = {action.step: device for device in range(devices) for action in schedule.actions(device)}
        for device in range(devices):
            for action in schedule.actions(device):
                begins = ends[action.step, action.microbatch] - seconds[action.step]
                live = 0
                for value in held:
                    (reader,) = value.readers
                    if device not in (where[value.maker], where[reader]):
                        continue
                    last = reader if where[reader] == device else value.maker
                    for batch in range(microbatches):
                        live += value.bytes * (ends[value.maker, batch] <= begins < ends[last, batch] - 1e-9)
                assert live <= predicted[device]
    assert len(peaks) == 1


def test_a_device_without_work_needs_nothing() -> None:
    graph = chain(1)
    timing = simulate_time(gpipe(2, 1, 3), graph, costs_of(graph, F=1.0, B=1.0))
    assert timing.peak_bytes == (0, 0) and timing.busy == (0.0, 6.0) and timing.bubble == 0.5


def test_what_stays_and_what_is_brought_count_for_every_microbatch() -> None:
    graph = chain(1)
    costs = StepCosts(
        seconds=dict.fromkeys(graph.steps, 1.0),
        held=(Held(2, (_F, 0), (), lasts=True),),
        base_bytes={(ActionKind.BACKWARD, 0): {0: 100}},
        incoming_gradient_bytes={(ActionKind.BACKWARD, 0): 5},
    )
    put_together = 3 * 2  # outputs exist twice then
    assert simulate_time(gpipe(1, 1, 3), graph, costs).peak_bytes == (100 + 3 * 5 + 3 * 2 + put_together,)


def test_devices_that_are_not_the_callers_have_copies_and_he_gets_their_gradients() -> None:
    """A parameter once (number 0 and 1), what belongs to a microbatch as often as there are microbatches (2)."""
    graph = chain(2)
    reads = {
        (_F, 0): {0: 100, 2: 3},
        (_F, 1): {1: 50},
        (ActionKind.BACKWARD, 0): {0: 100},
        (ActionKind.BACKWARD, 1): {1: 50, 2: 3},
    }
    gradients = {(ActionKind.BACKWARD, 0): {0: 100}, (ActionKind.BACKWARD, 1): {1: 50}}
    seconds = dict.fromkeys(graph.steps, 1.0)

    def peaks(*remote: int) -> tuple[int, ...]:
        parameters = frozenset({0, 1})
        costs = StepCosts(
            seconds=seconds, base_bytes=gradients, copied_bytes=reads, parameters=parameters, remote=frozenset(remote)
        )
        return simulate_time(gpipe(2, 2, 4), graph, costs).peak_bytes

    assert peaks() == (100, 50)
    assert peaks(1) == (100 + 50, 50 + 50 + 4 * 3)
    assert peaks(0) == (100 + 100 + 4 * 3, 100 + 50)


def test_what_lasts_is_also_there_where_it_is_read() -> None:
    """Batch norm's new statistics are the caller's, and a backward on another device reads them."""
    graph = chain(2)
    held = (Held(7, (_F, 0), ((_F, 1),), lasts=True),)
    costs = StepCosts(seconds=dict.fromkeys(graph.steps, 1.0), held=held)
    assert simulate_time(gpipe(2, 2, 1), graph, costs).peak_bytes == (7, 7)


@pytest.mark.parametrize("halves", [False, True])
def test_the_callers_device_has_the_outputs_and_incoming_gradients_of_others(halves: bool) -> None:
    graph = chain(2)
    for remote in (0, 1):
        costs = StepCosts(
            seconds=dict.fromkeys(graph.steps, 1.0),
            held=(Held(7, (_F, 1), (), lasts=True),),
            incoming_gradient_bytes={(ActionKind.BACKWARD, 1): 5},
            remote=frozenset({remote}),
        )
        schedule = gpipe(2, 2, 3)
        peaks = simulate_time(schedule.halves() if halves else schedule, graph, costs).peak_bytes
        with_gradients = 3 * 7 + 3 * 5
        # Outputs exist twice while they are put together: before the backward, or in the end.
        callers = max(with_gradients, 2 * 3 * 7) if halves else with_gradients + 3 * 7
        assert peaks == ((callers, with_gradients) if remote == 1 else (0, callers))


@given(devices=st.integers(1, 6), chunks=st.integers(1, 3), microbatches=st.integers(1, 14), recompute=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_schedule_is_valid(devices: int, chunks: int, microbatches: int, recompute: bool) -> None:
    stages = devices * chunks
    whole, split = chain(stages, recompute=recompute), chain(stages, split=True, recompute=recompute)
    for make, graph in ((gpipe, whole), (one_f_one_b, whole), (interleaved, whole), (zero_bubble, split)):
        made = with_recompute(make(devices, stages, microbatches), graph)
        validate(made, graph, microbatches, devices)
        assert made.size == microbatches * len(graph.steps)
    graph = slot_chain(chunks, stages + chunks, recompute=recompute)
    validate(
        with_recompute(round_robin(devices, chunks, stages + chunks, microbatches), graph), graph, microbatches, devices
    )


@given(
    devices=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    which=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_simulated_times_are_those_of_the_plain_simulator(
    devices: int, microbatches: int, which: str, data: st.DataObject
) -> None:
    stages = devices * (2 if which == "interleaved" else 1)
    graph = chain(stages, split=which == "zero_bubble", recompute=data.draw(st.booleans()))
    make = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zero_bubble": zero_bubble}[which]
    schedule = with_recompute(make(devices, stages, microbatches), graph)
    seconds = {step: data.draw(st.floats(0.1, 5.0)) for step in graph.steps}
    travel = {(s, step): data.draw(st.floats(0.0, 2.0)) for step, reads in graph.reads.items() for s in reads}
    costs = StepCosts(seconds=seconds, transfer_seconds=travel)
    timing = simulate_time(schedule, graph, costs)
    expected = ends_on_paper(schedule, graph, costs)
    for device in range(devices):
        for action, end in zip(schedule.actions(device), timing.ends[device], strict=True):
            assert end == pytest.approx(expected[action.step, action.microbatch])
    assert timing.makespan == pytest.approx(max(expected.values()) - min(start[0] for start in timing.starts))


def test_recompute_stands_before_the_wait_for_the_gradient() -> None:
    graph = chain(2, recompute=True)
    full = with_transfers(with_recompute(one_f_one_b(2, 2, 2), graph), graph)
    assert [str(action) for action in full[0]] == (
        ["F0.0", "S:F0.0>1", "F0.1", "S:F0.1>1", "R0.0", "V:B1.0<1", "B0.0", "R0.1", "V:B1.1<1", "B0.1"]
    )
    costs = costs_of(graph, F=1.0, R=1.0, B=2.0)
    timing = simulate_time(with_recompute(one_f_one_b(2, 2, 1), graph), graph, costs)
    assert timing.makespan == 1 + 1 + 1 + 2 + 2  # stage 0 recomputes while stage 1 does


def test_a_skipping_value_travels_directly() -> None:
    reads = dict(chain(3).reads)
    reads[_F, 2] = ((_F, 1), (_F, 0))
    full = with_transfers(one_f_one_b(3, 3, 1), StageGraph(reads))
    assert "S:F0.0>1 S:F0.0>2" in " ".join(map(str, full[0]))
    assert not any(action.of is _F and action.stage == 0 for action in full[1] if action.kind is ActionKind.SEND)
    assert str(full[2][0]) == "V:F1.0<1" and str(full[2][1]) == "V:F0.0<0"


def test_what_a_device_has_is_not_sent() -> None:
    full = with_transfers(gpipe(1, 3, 2), chain(3))
    assert all(action.of is None for action in full[0])


def test_large_schedules_take_seconds() -> None:
    devices, microbatches = 300, 1000
    graph = chain(devices)
    timing = simulate_time(one_f_one_b(devices, devices, microbatches), graph, costs_of(graph, F=1.0, B=2.0))
    assert timing.bubble == pytest.approx((devices - 1) / (microbatches + devices - 1))


def test_an_action_prints_and_reads_back() -> None:
    for text in ("F2.5", "R0.0", "B1.3", "I1.3", "W0.2", "S:F2.5>3", "V:B2.5<1"):
        assert str(Action.parse(text)) == text


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_interleaved_with_any_number_of_stages(devices: int) -> None:
    for stages in range(devices, 4 * devices + 1):
        reads: dict[StageAction, tuple[StageAction, ...]] = {}
        for stage in range(stages):
            reads[ActionKind.FORWARD, stage] = ((ActionKind.FORWARD, stage - 1),) if stage else ()
            later = ((ActionKind.BACKWARD, stage + 1),) if stage < stages - 1 else ()
            reads[ActionKind.BACKWARD, stage] = ((ActionKind.FORWARD, stage), *later)
        for microbatches in range(1, 10):
            validate(interleaved(devices, stages, microbatches), StageGraph(reads), microbatches, devices)


def test_microbatches_that_differ_need_their_own_bytes() -> None:
    graph = StageGraph({(ActionKind.FORWARD, 0): (), (ActionKind.BACKWARD, 0): ((ActionKind.FORWARD, 0),)})

    def costs(held: int, peak: int) -> StepCosts:
        return StepCosts(
            seconds=dict.fromkeys(graph.steps, 1.0),
            held=(Held(held, (ActionKind.FORWARD, 0), ((ActionKind.BACKWARD, 0),)),),
            peak_bytes={(ActionKind.FORWARD, 0): held, (ActionKind.BACKWARD, 0): peak},
            first_peak_bytes={(ActionKind.BACKWARD, 0): peak + 1},
            base_bytes={(ActionKind.BACKWARD, 0): {0: 1000}},
        )

    small, large = costs(10, 5), costs(100, 50)
    schedule = gpipe(1, 1, 3)
    assert simulate_time(schedule, graph, large).peak_bytes == (1000 + 200 + 50,)
    assert simulate_time(schedule, graph, large, {2: small}).peak_bytes == (1000 + 110 + 50,)
    assert simulate_time(schedule, graph, large, {1: small, 2: small}).peak_bytes == (1000 + 20 + 5,)
    assert simulate_time(schedule, graph, small, {0: large}).peak_bytes == (1000 + 20 + 5,)
