"""Any schedule is written as it is: copies in its order, early ones in the recompute module, the rest saved."""

from __future__ import annotations

import expecttest
import torch
from torch import fx, nn

from roundpipe_fx.analysis.cost.roofline import DEVICES
from roundpipe_fx.analysis.recomputation import Form
from roundpipe_fx.analysis.remat_schedule import BackwardOp, RematBlock, RematSchedule
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, input_nodes, saved_values
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.apply_remat_schedule import apply_remat_schedule
from roundpipe_fx.passes.segments import cut_segments
from roundpipe_fx.passes.stages import cut_stages
from roundpipe_fx.remat.save_policy import SavePolicy, recompute_unsaved, save_all, save_stage_inputs
from tests.capturing import capture_joint
from tests.graph_text import after

CPU = DEVICES["cpu"]


class Chain(nn.Module):
    """y = x W, its gradient by W reads a transposed view of exp(y)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.exp(x @ self.first) @ self.second).sum()


def _joint() -> tuple[JointGraph, dict[str, fx.Node]]:
    joint, segments = cut_segments(annotate(capture_joint(Chain(), torch.randn(8, 4)), CPU))
    joint, _ = cut_stages(joint, segments, 1, lambda size: 0.0)
    return joint, {node.name: node for node in joint.graph.nodes}


def _schedule(joint: JointGraph, recomputed: list[tuple[fx.Node, bool]]) -> RematSchedule:
    ops = [BackwardOp(node, Form.SAME, early) for node, early in recomputed]
    return RematSchedule((RematBlock(0, 0, (*ops, *map(BackwardOp, joint.in_phase(Phase.BACKWARD)))),))


def _text(joint: JointGraph, *phases: Phase) -> str:
    return "\n".join(
        f"{node.meta[Mark.PHASE]}: {node.name} = {getattr(node.target, '__name__', node.target)}"
        f"({', '.join(source.name for source in input_nodes(node))})"
        for node in joint.computed()
        if node.meta[Mark.PHASE] in phases
    )


def test_what_no_operation_recomputes_is_saved() -> None:
    joint, _ = _joint()
    apply_remat_schedule(joint, _schedule(joint, []), CPU)
    assert [node.name for node in saved_values(joint) if node.op != "placeholder"] == ["exp"]
    assert not joint.in_phase(Phase.RECOMPUTE)


def test_early_operations_are_of_phase_recompute_and_readers_read_the_copies() -> None:
    joint, named = _joint()
    apply_remat_schedule(joint, _schedule(joint, [(named["mm"], True), (named["exp"], True)]), CPU)
    assert _text(joint, Phase.RECOMPUTE) == (
        "recompute: mm_5 = mm.default(primals_2, primals_1)\n"  # the input, the weight
        "recompute: exp_1 = exp.default(mm_5)"
    )
    joint.graph.lint()
    assert not [node for node in saved_values(joint) if node.op != "placeholder"]
    assert all(user.meta[Mark.PHASE] is Phase.FORWARD for user in named["exp"].users)


def test_just_in_time_is_backward_and_reads_what_was_early() -> None:
    joint, named = _joint()
    apply_remat_schedule(joint, _schedule(joint, [(named["mm"], True), (named["exp"], False)]), CPU)
    assert [node.meta[Mark.ORIGIN] for node in joint.in_phase(Phase.RECOMPUTE)] == ["mm"]
    again = [node for node in joint.in_phase(Phase.BACKWARD) if node.meta.get(Mark.ORIGIN) and node.meta[Mark.BYTES]]
    assert [node.meta[Mark.ORIGIN] for node in again] == ["exp"]
    assert input_nodes(again[0]) == joint.in_phase(Phase.RECOMPUTE)


def test_a_view_that_both_phases_read_is_made_in_each() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(x @ self.weight).t()
            return (torch.sin(y) * y).sum()

    joint, segments = cut_segments(annotate(capture_joint(Transposed(), torch.randn(8, 4)), CPU))
    joint, _ = cut_stages(joint, segments, 1, lambda size: 0.0)
    named = {node.name: node for node in joint.graph.nodes}
    listed = [node for node in joint.in_phase(Phase.BACKWARD) if node.meta[Mark.BYTES]]
    ops = [BackwardOp(named[name], Form.SAME, early=True) for name in ("mm", "exp", "sin")]
    schedule = RematSchedule((RematBlock(0, 0, (*ops, *map(BackwardOp, listed))),))
    apply_remat_schedule(joint, schedule, CPU)
    joint.graph.lint()
    for node in joint.in_phase(Phase.RECOMPUTE):
        assert all(source.meta.get(Mark.PHASE) is not Phase.BACKWARD for source in input_nodes(node))
    views = [node for node in joint.computed() if node.meta.get(Mark.ORIGIN) == "t"]
    assert [node.meta[Mark.PHASE] for node in views] == [Phase.RECOMPUTE, Phase.BACKWARD]


def _applied(joint: JointGraph, policy: SavePolicy) -> JointGraph:
    return apply_remat_schedule(joint, recompute_unsaved(joint, policy(joint)), CPU)


def test_as_text_each_stage_recomputes_what_it_needs() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # forward, stage 1, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward, stage 1, segment 1
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t: float32[8, 4] = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    t_1: float32[8, 8] = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # backward, stage 0, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4] = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
"""
    made = after(_applied, before, save_stage_inputs, name="apply_remat_schedule")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # forward, stage 1, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # recompute, stage 1, segment 1
    mm_5: float32[4, 8] = aten.mm.default(tanh, w)  # repeats: mm_1
    exp_1: float32[4, 8] = aten.exp.default(mm_5)  # repeats: exp
    # backward, stage 1, segment 1
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp_1)
    t: float32[8, 4].strides(1, 8) = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    t_1: float32[8, 8].strides(1, 8) = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # backward, stage 0, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4].strides(1, 8) = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
""",
    )


def test_as_text_all_is_saved() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # forward, stage 1, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward, stage 1, segment 1
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t: float32[8, 4] = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    t_1: float32[8, 8] = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # backward, stage 0, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4] = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
"""
    made = after(_applied, before, save_all, name="apply_remat_schedule")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # forward, stage 1, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward, stage 1, segment 1
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t: float32[8, 4].strides(1, 8) = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    t_1: float32[8, 8].strides(1, 8) = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # backward, stage 0, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4].strides(1, 8) = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
""",
    )
