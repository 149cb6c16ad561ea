from __future__ import annotations

import operator
from collections import defaultdict

import expecttest
import pytest
import torch
from torch import fx

import roundpipe_fx
from roundpipe_fx.ir.joint_graph import Mark, Phase, is_tensor
from roundpipe_fx.ir.text import graph_text
from roundpipe_fx.passes.overlap_recompute import overlap_recompute
from tests.golden_models import GOLDEN
from tests.graph_text import program_of
from tests.remat.graphs import mlp

streams = torch.ops.streams


def _backward(name: str, recompute: str) -> fx.Graph:
    make, make_batch, stages = GOLDEN[name]
    compiled = roundpipe_fx.compile(make(), stages=stages, recompute=recompute, fullgraph=True)
    return compiled.trace(**make_batch()).programs[1].module.graph


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.quick_every(2)
def test_every_read_on_another_stream_happens_after_the_write(name: str) -> None:
    """Simulated with vector clocks: each stream knows how far it has seen each other stream."""
    graph = _backward(name, "full")
    current = 0
    clock: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    events: dict[int, dict[int, int]] = {}
    made: dict[fx.Node, tuple[int, int]] = {}
    announced: set[tuple[fx.Node, int]] = set()
    crossed = 0
    last_use = {s: n for n in graph.nodes if n.target is not operator.getitem for s in n.all_input_nodes}
    for node in graph.nodes:
        if node.op == "placeholder":
            made[node] = (0, 0)
        elif node.target is streams.record_event.default:
            event, stream = node.args
            events[event] = dict(clock[stream])
        elif node.target is streams.wait_event.default:
            event, stream = node.args
            for other, time in events[event].items():
                clock[stream][other] = max(clock[stream][other], time)
        elif node.target in (streams.fork.default, streams.join.default):
            assert node.args[0] == current
            current = node.args[1]
        elif node.target is streams.record_stream.default:
            announced.add(node.args)
        elif node.op == "call_module":
            clock[current][current] += 1
            for source in node.all_input_nodes:
                stream, time = made[source]
                assert clock[current][stream] >= time, f"{node.target} reads {source} before it is made"
                if stream != current and is_tensor(source) and Mark.PHASE in source.meta and last_use[source] is node:
                    crossed += 1
                    assert (source, current) in announced, f"{source} may be freed while stream {current} reads it"
            for item in node.users:
                made[item] = (current, clock[current][current])
    assert current == 0
    assert crossed


def test_recomputation_may_start_before_the_backward_it_runs_beside() -> None:
    order = [(node.target, node.args) for node in _backward("dropout_mlp", "full").nodes if node.op.startswith("call_")]
    targets = [str(target) for target, _ in order]
    ready = targets.index("streams.record_event.default")
    assert ready < targets.index("stage_1_backward") < targets.index("streams.fork.default")
    assert targets.index("streams.fork.default") < targets.index("stage_0_recompute")
    assert (
        targets.index("stage_0_recompute") < targets.index("streams.join.default") < targets.index("stage_0_backward")
    )


def test_nothing_forks_where_nothing_is_recomputed() -> None:
    assert not [n for n in _backward("dropout_mlp", "none").nodes if str(n.target).startswith("streams.")]


def _within_a_budget(width: int, rows: int) -> tuple[roundpipe_fx.Plan, fx.Graph]:
    compiled = roundpipe_fx.compile(mlp(depth=6, width=width), stages=3, memory_budget=0.3, fullgraph=True)
    plan = compiled.trace(torch.randn(rows, width))
    return plan, plan.programs[1].module.graph


def test_within_a_budget_recomputation_is_forked_too() -> None:
    plan, graph = _within_a_budget(16, 64)
    assert [call for call in plan.programs[1].calls if call.phase is Phase.RECOMPUTE]
    assert any(node.target is streams.fork.default for node in graph.nodes)


def test_kernels_that_fill_the_device_run_where_they_stand() -> None:
    plan, graph = _within_a_budget(64, 2048)
    assert [call for call in plan.programs[1].calls if call.phase is Phase.RECOMPUTE]
    assert not [node for node in graph.nodes if str(node.target).startswith("streams.")]


def test_what_reads_the_call_before_it_waits_for_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_module("stage_1_backward", ([x],))
    again = graph.call_module("stage_0_recompute", ([graph.call_function(operator.getitem, (before, 0))],))
    graph.output(graph.call_function(operator.getitem, (again, 0)))
    overlap_recompute(graph, {"stage_0_recompute"})
    assert not [node for node in graph.nodes if str(node.target).startswith("streams.")]


def test_as_text_a_recomputation_runs_beside_the_gradient_before_it() -> None:
    before = """\
def graph(
    w: float32[8, 8],  # parameter
    x: float32[4, 8],
    tanh: float32[4, 8],  # saved
    tangents_1: float32[4, 8],
):
    stage_1_backward = stage_1_backward([w, tanh, tangents_1])
    mm: float32[4, 8] = stage_1_backward[0]
    stage_0_recompute = stage_0_recompute([w, x])
    mm_1: float32[4, 8] = stage_0_recompute[0]
    stage_0_backward = stage_0_backward([w, mm, mm_1])
    mm_2: float32[8, 8] = stage_0_backward[0]
    return (mm_2, None)
"""
    expecttest.assert_expected_inline(
        graph_text(overlap_recompute(program_of(before), {"stage_0_recompute"})),
        """\
def graph(
    w: float32[8, 8],
    x: float32[4, 8],
    tanh: float32[4, 8],
    tangents_1: float32[4, 8],
):
    record_event_default: NoneType = streams.record_event(2, 0)
    stage_1_backward = stage_1_backward([w, tanh, tangents_1])
    mm: float32[4, 8] = stage_1_backward[0]
    fork_default: NoneType = streams.fork(0, 1)
    wait_event_default: NoneType = streams.wait_event(2, 1)
    stage_0_recompute = stage_0_recompute([w, x])
    mm_1: float32[4, 8] = stage_0_recompute[0]
    record_event_default_1: NoneType = streams.record_event(3, 1)
    join_default: NoneType = streams.join(1, 0)
    wait_event_default_1: NoneType = streams.wait_event(3, 0)
    record_stream_default: NoneType = streams.record_stream(mm_1, 0)
    stage_0_backward = stage_0_backward([w, mm, mm_1])
    mm_2: float32[8, 8] = stage_0_backward[0]
    return (mm_2, None)
""",
    )


def test_as_text_what_it_reads_last_is_announced_to_the_allocator() -> None:
    before = """\
def graph(
    x: float32[4, 8],  # saved
    y: float32[4, 8],  # saved
    tangents_1: float32[4, 8],
):
    stage_1_backward = stage_1_backward([y, tangents_1])
    mm: float32[4, 8] = stage_1_backward[0]
    stage_0_recompute = stage_0_recompute([x, y])
    exp: float32[4, 8] = stage_0_recompute[0]
    tanh: float32[4, 8] = stage_0_recompute[1]
    stage_0_backward = stage_0_backward([mm, x, exp, tanh])
    mm_1: float32[4, 8] = stage_0_backward[0]
    return (mm_1,)
"""
    expecttest.assert_expected_inline(
        graph_text(overlap_recompute(program_of(before), {"stage_0_recompute"})),
        """\
def graph(
    x: float32[4, 8],
    y: float32[4, 8],
    tangents_1: float32[4, 8],
):
    record_event_default: NoneType = streams.record_event(2, 0)
    stage_1_backward = stage_1_backward([y, tangents_1])
    mm: float32[4, 8] = stage_1_backward[0]
    fork_default: NoneType = streams.fork(0, 1)
    wait_event_default: NoneType = streams.wait_event(2, 1)
    record_stream_default: NoneType = streams.record_stream(y, 1)
    stage_0_recompute = stage_0_recompute([x, y])
    exp: float32[4, 8] = stage_0_recompute[0]
    tanh: float32[4, 8] = stage_0_recompute[1]
    record_event_default_1: NoneType = streams.record_event(3, 1)
    join_default: NoneType = streams.join(1, 0)
    wait_event_default_1: NoneType = streams.wait_event(3, 0)
    record_stream_default_2: NoneType = streams.record_stream(exp, 0)
    record_stream_default_1: NoneType = streams.record_stream(tanh, 0)
    stage_0_backward = stage_0_backward([mm, x, exp, tanh])
    mm_1: float32[4, 8] = stage_0_backward[0]
    return (mm_1,)
""",
    )


def test_as_text_one_that_does_not_gain_stays_where_it_is() -> None:
    before = """\
def graph(
    x: float32[4, 8],  # saved
    tangents_1: float32[4, 8],
):
    stage_1_backward = stage_1_backward([tangents_1])
    mm: float32[4, 8] = stage_1_backward[0]
    stage_0_recompute = stage_0_recompute([x])
    exp: float32[4, 8] = stage_0_recompute[0]
    stage_0_backward = stage_0_backward([mm, exp])
    mm_1: float32[4, 8] = stage_0_backward[0]
    return (mm_1,)
"""
    expecttest.assert_expected_inline(
        graph_text(overlap_recompute(program_of(before), ())),
        """\
def graph(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    stage_1_backward = stage_1_backward([tangents_1])
    mm: float32[4, 8] = stage_1_backward[0]
    stage_0_recompute = stage_0_recompute([x])
    exp: float32[4, 8] = stage_0_recompute[0]
    stage_0_backward = stage_0_backward([mm, exp])
    mm_1: float32[4, 8] = stage_0_backward[0]
    return (mm_1,)
""",
    )
