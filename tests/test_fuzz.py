"""The fuzzer: some of its cases, that it finds what is wrong, and that it makes it small."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from benchmarks.fuzz import check
from benchmarks.fuzz.__main__ import case_of
from benchmarks.fuzz.batches import BATCHES, Structured, parts_of, structured
from benchmarks.fuzz.case import Case, Element
from benchmarks.fuzz.check import Failure, check_case
from benchmarks.fuzz.doors import DOORS
from benchmarks.fuzz.forks import in_child
from benchmarks.fuzz.meter import AllocatorPeak, StoragePeak
from benchmarks.fuzz.operations import BODIES, KINDS
from benchmarks.fuzz.program import Program, write_program
from benchmarks.fuzz.reduce import reduced, script
from benchmarks.fuzz.references import References
from benchmarks.fuzz.steps import losses_of
from roundpipe_fx.analysis import snapshots
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.passes import pipeline
from tests.long import long_but

_FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX only")


def _case(
    *kinds: str,
    way: dict[str, object] | None = None,
    dtype: str = "float64",
    returns: str = "loss",
    use: str = "all",
) -> Case:
    """A case of these kinds, one way."""
    elements = tuple(
        Element(i, kind, 1000 + i, (Element(100 * (i + 1), "tanh", 7),) if kind in BODIES else ())
        for i, kind in enumerate(kinds)
    )
    return Case(0, 0, elements, dtype, (6, 4), ((3, 8),), returns, False, use, (way or {"mode": "step"},))


@pytest.mark.parametrize("number", [1, 3, 4])
@pytest.mark.long
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


def test_cases_have_the_features_that_a_run_may_leave_out() -> None:
    drawn = [case_of(3, number) for number in range(150)]
    ways = [way for case in drawn for way in case.ways]
    assert {way.get("door", "compile") for way in ways} == set(DOORS)
    assert {way["batch"] for way in ways if "batch" in way} == set(BATCHES)
    assert {case.use.partition(",")[0] for case in drawn} == {"all", "first", "last", "twice"}
    assert {"loss", "tensor", "tuple", "dict", "beside", "losses"} == {case.returns for case in drawn}
    assert any(case.use.endswith("dropped") for case in drawn) and any(way["mode"] == "fork" for way in ways)
    for number, case in enumerate(drawn[:40]):
        plain = case_of(3, number, among=())
        assert plain.elements == case.elements and len(plain.ways) == len(case.ways)
        assert plain.use == "all" and plain.returns not in ("beside", "losses")
        assert all(way.keys().isdisjoint(("door", "batch", "trained")) for way in plain.ways)


def test_losses_are_those_of_the_outputs_that_a_step_differentiates() -> None:
    x = torch.arange(3.0, requires_grad=True)
    output = {"logits": x * 2, "loss": x.sum(), "mask": x > 0, "hidden": x.tanh()}

    def values(use: str) -> list[float]:
        return [loss.item() for loss in losses_of(output, use)]

    assert values("first") == [(x * 2).square().mean().item()] == values("first, dropped")
    assert values("last") == [x.tanh().square().mean().item()]
    assert values("twice")[0] == values("first")[0] and len(values("twice")) == 2
    assert len(values("all")) == 1
    assert [loss.item() for loss in losses_of(x.sum(), "twice")] == [3.0, 3.0]


@pytest.mark.parametrize("use", long_but(["all", "first, dropped", "last", "twice"], quick={"first, dropped"}))
def test_outputs_may_be_dropped_or_differentiated_twice(use: str) -> None:
    case = _case("linear", "tanh", way={"mode": "step"}, returns="beside", use=use)
    result = check_case(case)
    assert not result.failures and result.checks["gradients"] == 2, (result.failures, result.skipped)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_batches_hold_what_the_program_reads_and_returns(kind: str, count: int) -> None:
    class Net(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return sum(inputs), inputs[0] * 2  # type: ignore[return-value]

    inputs = [torch.randn(4, 3) for _ in range(count)]
    parts = parts_of(Structured(Net(), kind, count)(*structured(inputs, kind)), kind)
    assert all(torch.equal(one, other) for one, other in zip(parts, Net()(*inputs), strict=kind != "number"))
    assert len(parts) == (3 if kind == "number" else 2)


def test_a_batch_of_the_first_microbatch_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a dict's tensors were the first microbatch's."""
    way = {"mode": "pipeline", "devices": 0, "microbatches": 2, "call": "autograd", "batch": "dict"}
    case = _case("linear", "tanh", way=way, returns="tensor")
    result = check_case(case)
    assert not result.failures and result.checks["outputs"] == 2, result.skipped
    monkeypatch.setattr("roundpipe_fx.pipeline.step.step.merge", lambda outputs, *_: outputs[0])
    assert "outputs" in {failure.kind for failure in check_case(case).failures}


def test_a_refusal_has_to_name_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    way = {"mode": "pipeline", "devices": 0, "microbatches": 2, "call": "forward_backward", "batch": "object"}
    case = _case("linear", way=way)
    for text in ("an object as the batch: give split_input", "an object as the batch"):

        def refuse(*_: object, text: str = text) -> None:
            raise TypeError(text)

        monkeypatch.setattr("roundpipe_fx.pipeline.step.step.split_inputs", refuse)
        result = check_case(case)
        assert result.checks["refused by the option's name"] == 1
        assert len(result.failures) == ("split_input" not in text)


@pytest.mark.parametrize("door", long_but(DOORS, quick={"in place"}))
def test_a_budget_is_kept_behind_every_door_or_told_where_nothing_is_planned_again(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = _case("linear", "tanh", way={"mode": "step", "memory_budget": 0.0, "door": door})

    def exceeded(*_: object) -> int:
        return 10**9

    monkeypatch.setattr(check, "_settled", exceeded)
    assert [failure.kind for failure in check_case(case).failures] == ["budget"]

    def told(*_: object) -> int:
        warnings.warn("roundpipe_fx: 1000000000 bytes, and the memory_budget is 7 bytes", stacklevel=1)
        return 10**9

    monkeypatch.setattr(check, "_settled", told)
    result = check_case(case)
    replans = door == "compile"
    assert len(result.failures) == replans and result.checks["budget, or told"] == (not replans)


@_FORKS
def test_a_forked_child_that_does_not_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_child(lambda: "7", 20) == "7"
    assert in_child(lambda: str(1 // 0), 20).startswith("it raised ZeroDivisionError")
    assert in_child(lambda: os._exit(3), 20) == "it died"  # type: ignore[arg-type, func-returns-value]
    assert in_child(lambda: str(time.sleep(100)), 0.2) == "it hangs"

    case = _case("linear", "dropout", way={"mode": "fork", "trained": True})
    result = check_case(case)
    assert not result.failures and result.checks["forked child"] == 1
    monkeypatch.setattr(check, "in_child", lambda task, seconds: "it hangs")
    assert [failure.kind for failure in check_case(case).failures] == ["forked child"]


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


class _LateBuffer(Program):
    """A checkpoint in float32 whose buffer is another by the time that it is recomputed.

    The error is small beside the other gradients, of which eager rounds one otherwise than what is traced.
    """

    source = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = nn.Linear(8, 8)
        self.large = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def body(self, x):
        y = x + self.seen
        self.seen.copy_(x.detach()[0])
        return y.tanh()

    def forward(self, x):
        return 0.01 * torch_checkpoint(self.body, self.small(x[:, 0]), use_reentrant=False), self.large(x)
"""


@pytest.mark.parametrize(
    "way",
    [
        {"mode": "step"},
        {"mode": "pipeline", "devices": 0, "microbatches": 1, "schedule": "gpipe", "call": "autograd", "stages": 2},
    ],
    ids=lambda way: way["mode"],
)
def test_what_the_reference_reads_too_late_is_no_failure(
    way: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = dataclasses.replace(_case(way=way, dtype="float32", returns="tuple"), inputs=((30, 8),))
    monkeypatch.setattr(check, "write_program", lambda *_: _LateBuffer(case))
    result = check_case(case)
    assert not result.failures and result.checks["gradients"] == 2, (result.failures, result.skipped)
    assert not result.reference_differs


def test_bits_are_those_of_one_reference() -> None:
    case = dataclasses.replace(_case(dtype="float32", returns="tuple"), inputs=((30, 8),))
    references = References(_LateBuffer(case), lambda text: None)
    right = references.without_checkpoints()[1]
    late = references.aot[1].gradients["small.weight"]
    one = right.gradients["small.weight"]
    assert one is not None and late is not None and not torch.equal(one, late)
    assert not references.wrong(right, 1) and not references.wrong(references.eager[1], 1)
    for other in (late, torch.nextafter(one, 2 * one)):
        left = dataclasses.replace(right, gradients={**right.gradients, "small.weight": other})
        assert references.wrong(left, 1).keys() == {"gradients"}


@pytest.mark.long
def test_a_lost_copy_of_a_buffer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation that reads buffers as they are by then."""
    case = _case("linear", "counter_read_twice", "sin", "linear", way={"mode": "step", "recompute": "full"})
    assert not check_case(case).failures
    monkeypatch.setattr(snapshots.Snapshots, "get_copy", lambda self, source: source)
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


@pytest.mark.long
def test_the_allocators_meter_sees_what_inductor_allocates() -> None:
    compiled = torch.compile(lambda x, w: torch.softmax(x @ w, -1).sum(-1))
    x, w = torch.randn(200, 30), torch.randn(30, 500)
    compiled(x, w)
    with AllocatorPeak() as allocated:
        compiled(x, w)
    assert allocated.peak >= 4 * 200 * 500


def test_the_allocators_meter_sees_what_kernels_use_inside() -> None:
    matrix = torch.randn(64, 64)
    with StoragePeak() as storages, AllocatorPeak() as allocated:
        torch.linalg.matrix_exp(matrix)
    assert allocated.peak > 2 * matrix.nbytes and storages.peak >= matrix.nbytes
