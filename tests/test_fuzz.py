"""The fuzzer: some of its cases, that it finds what is wrong, and that it makes it small."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import fx

from benchmarks.fuzz.__main__ import case_of
from benchmarks.fuzz.case import Case, Element
from benchmarks.fuzz.check import Failure, check_case
from benchmarks.fuzz.meter import AllocatorPeak, StoragePeak
from benchmarks.fuzz.operations import BODIES, KINDS
from benchmarks.fuzz.program import write_program
from benchmarks.fuzz.reduce import reduced, script
from roundpipe_fx.analysis import snapshots
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.passes import pipeline
from tests.long import long_but


def _case(*kinds: str, way: dict[str, object] | None = None, dtype: str = "float64") -> Case:
    """A case of these kinds, one way."""
    elements = tuple(
        Element(i, kind, 1000 + i, (Element(100 * (i + 1), "tanh", 7),) if kind in BODIES else ())
        for i, kind in enumerate(kinds)
    )
    return Case(0, 0, elements, dtype, (6, 4), ((3, 8),), "loss", False, (way or {"mode": "step"},))


@pytest.mark.parametrize("number", long_but([0, 1, 3, 4], quick={1}))
def test_some_cases(number: int) -> None:
    result = check_case(case_of(20, number, most=8, ways=2))
    assert not result.failures, result.failures
    assert sum(result.checks.values()) > 20, result.skipped


def test_there_are_many_kinds_and_they_write_programs() -> None:
    assert len(KINDS) > 500
    written = set()
    for number in range(60):
        program = write_program(case_of(3, number), KINDS)
        written |= set(program.kinds)
        compile(program.source, "program", "exec")
    assert len(written) > 300


def test_a_case_is_the_same_for_the_same_seed() -> None:
    assert case_of(5, 3) == case_of(5, 3) != case_of(5, 4)
    assert write_program(case_of(5, 3), KINDS).source == write_program(case_of(5, 3), KINDS).source


def test_a_gradient_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a pass multiplied a gradient by a little more than one."""

    def broken(joint: JointGraph) -> JointGraph:
        gradient = next(node for node in joint.gradients if isinstance(node, fx.Node))
        with joint.graph.inserting_before(joint.graph.output_node()):
            scaled = joint.graph.call_function(torch.ops.aten.mul.Tensor, (gradient, 1 + 1e-5))
        value = gradient.meta["val"]
        with value.fake_mode:
            scaled.meta = {**gradient.meta, "val": torch.empty_like(value)}
        gradient.replace_all_uses_with(scaled, delete_user_cb=lambda user: user.op == "output")
        return joint

    monkeypatch.setattr(pipeline, "release_resolved_random_branches", broken)
    case = _case("linear", "tanh")
    assert {failure.kind for failure in check_case(case).failures} == {"gradients"}


@pytest.mark.long
def test_a_lost_copy_of_a_buffer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation that reads buffers as they are by then."""
    case = _case("linear", "counter_read_twice", "sin", "linear", way={"mode": "step", "recompute": "full"})
    assert not check_case(case).failures
    monkeypatch.setattr(snapshots.Snapshots, "of", lambda self, source: source)
    (failure,) = check_case(case).failures
    assert failure.kind == "exception RuntimeError" and "inplace" in failure.text


@pytest.mark.long
def test_what_a_plan_leaves_out_is_found(no_workspaces: None) -> None:
    case = _case("linear", "matrix_exp", way={"mode": "step", "memory_budget": 0.0})
    assert {failure.kind for failure in check_case(case).failures} == {"budget"}


def _fails_with(*kinds: str) -> Callable[[Case], Failure | None]:
    """As if programs with these kinds failed."""

    def fails(case: Case) -> Failure | None:
        written = write_program(case, KINDS).kinds
        return Failure("gradients", case.ways[0], "differ") if set(kinds) <= set(written) else None

    return fails


def test_a_failing_case_is_made_small() -> None:
    way = {"mode": "pipeline", "devices": 2, "microbatches": 3, "schedule": "gpipe", "call": "autograd", "stages": 3}
    kinds = [*list(KINDS)[:18], "logcumsumexp", "linear", "tanh", "checkpoint", "counter", "relu"]
    case = dataclasses.replace(_case(*kinds, way=way), inputs=((3, 8), (7,)))
    fails = _fails_with("logcumsumexp", "counter")
    failure = fails(case)
    assert failure is not None
    small, found = reduced(case, failure, fails)
    assert [element.kind for element in small.elements] == ["logcumsumexp", "counter"]
    assert len(small.inputs) == 1 and found.way["microbatches"] == 1 and found.way["devices"] == 0
    text = script(small, found)
    assert "class Net(nn.Module)" in text and "--seed 0 --case 0" in text
    compile(text, "script", "exec")


def test_a_printed_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    case = _case("linear", "counter", way={"mode": "step", "memory_budget": 0.0})
    exec(script(case, Failure("gradients", case.ways[0], "differ")), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "step 2 loss" in printed and "differs" not in printed and "budget" in printed


def test_the_meters_count_what_lives_at_once() -> None:
    def three() -> None:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(2000, dtype=torch.uint8)
        view = b[10:]
        del a
        c = torch.empty(500, dtype=torch.uint8)
        del b, c, view

    before = torch.empty(5000, dtype=torch.uint8)
    for meter in (StoragePeak(), AllocatorPeak()):
        with meter:
            three()
            before = before.clone()  # the old one is none of what was allocated inside
        assert meter.peak in (3000, 5000)
        assert meter.peak == 5000


def test_the_allocators_meter_sees_what_kernels_use_inside() -> None:
    matrix = torch.randn(64, 64)
    with StoragePeak() as storages, AllocatorPeak() as allocated:
        torch.linalg.matrix_exp(matrix)
    assert allocated.peak > 2 * matrix.nbytes and storages.peak >= matrix.nbytes
