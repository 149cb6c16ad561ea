"""Orders of sends and receives: matched and free of deadlock for every schedule, and refused where they are not."""

from __future__ import annotations

import pytest

from roundpipe_fx.distributed.transfer_orders import check_transfers, make_orders, transfers_of
from roundpipe_fx.runtime.pipeline_program import PipelineProgram, Source, StepCode, instructions_of
from roundpipe_fx.schedules import (
    Action,
    ActionKind,
    InvalidScheduleError,
    Schedule,
    StageGraph,
    chain,
    dualpipev,
    gpipe,
    interleaved,
    one_f_one_b,
    with_transfers,
    zbv,
    zero_bubble,
)


def _program(graph: StageGraph) -> PipelineProgram:
    """A program in which each stage action computes one number, which its readers read."""
    numbers = {step: number for number, step in enumerate(graph.steps)}
    steps = {
        step: StepCode(
            call=lambda arguments: (0,),
            inputs=tuple(Source("value", numbers[source]) for source in sources),
            outputs=(numbers[step],),
            elsewhere=lambda device: lambda arguments: (0,),
        )
        for step, sources in graph.reads.items()
    }
    return PipelineProgram(
        steps=steps, graph=graph, outputs=(), gradients=(), tangents=(), mutations={}, values=(0,) * len(numbers)
    )


def _with_skips(graph: StageGraph) -> StageGraph:
    """The last forward reads all others, and the first backward reads the last forward."""
    steps = list(graph.steps)
    forwards = [step for step in steps if step[0] == "F"]
    reads = dict(graph.reads)
    reads[forwards[-1]] = tuple(forwards[:-1])
    return StageGraph(reads)


SCHEDULES = {
    "gpipe": (gpipe, 1, False),
    "1f1b": (one_f_one_b, 1, False),
    "interleaved": (interleaved, 2, False),
    "zero_bubble": (zero_bubble, 1, True),
    "zbv": (zbv, 2, True),
    "dualpipev": (dualpipev, 2, True),
}


def test_what_is_awaited_at_the_end_cannot_deadlock() -> None:
    """Each rank starts the other's receive only after an action that follows its own send."""
    text = "F0.0 S:F0.0>1 F2.0 V:F1.0<1\nF1.0 S:F1.0>0 F3.0 V:F0.0<0"
    orders = [[Action.parse(word) for word in line.split()] for line in text.splitlines()]
    with pytest.raises(InvalidScheduleError, match="for ever"):
        check_transfers(orders, {})
    check_transfers(orders, {}, [{1}, {0}])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("devices", [2, 3, 5])
@pytest.mark.parametrize("skips", [False, True])
def test_orders_of_schedules_are_valid(name: str, devices: int, skips: bool) -> None:
    make, times, split = SCHEDULES[name]
    graph = chain(devices * times, split=split)
    graph = _with_skips(graph) if skips else graph
    schedule = make(devices, devices * times, 2 * devices)
    programs = [_program(graph)] * (2 * devices)
    instructions = instructions_of(schedule, programs)
    orders = make_orders(instructions, transfers_of(instructions, programs))
    check_transfers(orders, graph.reads)
    expected = with_transfers(schedule, graph)
    for order, other in zip(orders, expected, strict=True):  # the same transfers, receives perhaps earlier
        assert sorted(map(str, order)) == sorted(map(str, other))
        assert [str(own) for own in order if own.of is None] == [str(own) for own in other if own.of is None]


def test_receives_are_started_as_early_as_they_can_arrive() -> None:
    """Rank 0 waits for nothing before its second send, and rank 1 for nothing but the first send before B1.0."""
    graph = chain(2)
    programs = [_program(graph)] * 2
    instructions = instructions_of(one_f_one_b(2, 2, 2), programs)
    orders = make_orders(instructions, transfers_of(instructions, programs))
    assert [" ".join(map(str, order)) for order in orders] == [
        "F0.0 S:F0.0>1 V:B1.0<1 F0.1 S:F0.1>1 V:B1.1<1 B0.0 B0.1",
        "V:F0.0<0 V:F0.1<0 F1.0 B1.0 S:B1.0>0 F1.1 B1.1 S:B1.1>0",
    ]


def test_receives_follow_the_sender_where_the_reader_does_not() -> None:
    """Rank 1 reads the second microbatch first."""
    graph = chain(2, training=False)
    programs = [_program(graph)] * 2
    instructions = instructions_of(Schedule.parse("F0.0 F0.1\nF1.1 F1.0"), programs)
    orders = make_orders(instructions, transfers_of(instructions, programs))
    assert " ".join(map(str, orders[1])) == "V:F0.0<0 V:F0.1<0 F1.1 F1.0"
    check_transfers(orders, graph.reads)


F = ActionKind.FORWARD


@pytest.mark.parametrize(
    ("text", "reads", "message"),
    [
        (
            "F0.0 S:F0.0>1 F0.1 S:F0.1>1\nV:F0.1<0 V:F0.0<0 F1.0 F1.1",
            {1: (0,)},
            "transfer 0 from rank 0 to rank 1: F0.0 is sent, and F0.1 is received",
        ),
        ("F0.0 S:F0.0>1 F0.1\nV:F0.0<0 F1.0 V:F0.1<0 F1.1", {1: (0,)}, "nothing is sent, and F0.1 is received"),
        ("F0.0 S:F0.0>1\nF1.0", {}, "F0.0 is sent, and nothing is received"),
        ("F0.0 S:F0.0>1\nF1.0 V:F0.0<0", {1: (0,)}, "F1.0 reads F0.0 of rank 0 before the receive is started"),
        ("V:F1.0<1 F0.0 S:F0.0>1\nV:F0.0<0 F1.0 S:F1.0>0", {0: (1,), 1: (0,)}, "rank 0 waits at F0.0 for ever"),
        # Each waits for its send to be over before it starts the other's receive.
        ("F0.0 S:F0.0>1 F2.0 V:F1.0<1\nF1.0 S:F1.0>0 F3.0 V:F0.0<0", {}, "rank 0 waits at F2.0 for ever"),
    ],
)
def test_doctored_orders_are_refused(text: str, reads: dict[int, tuple[int, ...]], message: str) -> None:
    orders = [[Action.parse(word) for word in line.split()] for line in text.splitlines()]
    with pytest.raises(InvalidScheduleError, match=message):
        check_transfers(orders, {(F, stage): tuple((F, own) for own in sources) for stage, sources in reads.items()})
