from __future__ import annotations

import expecttest
import pytest
import torch
from torch import nn

from roundpipe_fx.analysis.cost.roofline import DEVICES
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, input_nodes, saved_values
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.apply_remat_schedule import apply_remat_schedule
from roundpipe_fx.passes.roundpipe_slots import cut_roundpipe_slots
from roundpipe_fx.passes.segments import cut_segments
from roundpipe_fx.remat.save_policy import recompute_unsaved, save_slot_inputs
from roundpipe_fx.schedules.roundpipe_partition import RoundPipePartition
from tests.capturing import capture_joint
from tests.graph_text import after
from tests.pipeline.steps import Blocks

CPU = DEVICES["cpu"]


def _joint() -> tuple[JointGraph, int]:
    joint, segments = cut_segments(annotate(capture_joint(Blocks(depth=6), torch.randn(4, 16)), CPU))
    return joint, len(segments)


def test_forward_and_backward_are_cut_apart() -> None:
    joint, count = _joint()
    assert count == 6
    joint, cuts = cut_roundpipe_slots(joint, RoundPipePartition(((0, 3),), (4, 5), ((2, 3), (0, 1))))
    assert [(cut.index, cut.first, cut.last) for cut in cuts] == [(0, 0, 3), (1, 4, 5), (2, 2, 3), (3, 0, 1)]
    slots = {phase: {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1} for phase in (Phase.FORWARD,)}
    slots[Phase.BACKWARD] = {5: 1, 4: 1, 3: 2, 2: 2, 1: 3, 0: 3}
    for node in joint.computed():
        assert node.meta[Mark.STAGE] == slots[node.meta[Mark.PHASE]][node.meta[Mark.SEGMENT]]
    # Slots run in order: nothing reads what a later one makes.
    for node in joint.computed():
        for source in input_nodes(node):
            if Mark.STAGE in source.meta:
                assert source.meta[Mark.STAGE] <= node.meta[Mark.STAGE]


def test_slots_keep_what_enters_them_and_the_fused_one_keeps_all() -> None:
    joint, _ = _joint()
    joint, _ = cut_roundpipe_slots(joint, RoundPipePartition(((0, 3),), (4, 5), ((2, 3), (0, 1))))
    joint = apply_remat_schedule(joint, recompute_unsaved(joint, save_slot_inputs(joint)), CPU)
    again = [node for node in joint.computed() if Mark.ORIGIN in node.meta and node.meta[Mark.SECONDS]]
    repeated = {node.meta[Mark.SEGMENT] for node in again}
    assert repeated == {0, 1, 2, 3}
    live_across = [node for node in saved_values(joint) if node.op != "placeholder" and node.meta[Mark.SEGMENT] < 4]
    assert {node.meta[Mark.SEGMENT] for node in live_across} <= {1, 3}
    assert {node.meta[Mark.STAGE] for node in again} == {2, 3}


class Detached(nn.Module):
    """Four segments of which those in the middle have no backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *middle, last = self.layers
        gate = x = first(x).tanh()
        for layer in middle:
            gate = layer(gate.detach()).sigmoid()
        return last(x * gate.detach()).tanh()


@pytest.mark.parametrize("fused", [True, False])
def test_segments_without_a_backward_are_kept_as_their_slot_is(fused: bool) -> None:
    joint, segments = cut_segments(annotate(capture_joint(Detached(), torch.randn(64, 16)), CPU))
    last = len(segments) - 1
    of_backward = {node.meta[Mark.SEGMENT] for node in joint.in_phase(Phase.BACKWARD)}
    (without, *_) = sorted(set(range(last)) - of_backward)
    first = without if fused else last
    joint, _ = cut_roundpipe_slots(joint, RoundPipePartition(((0, first - 1),), (first, last), ((0, first - 1),)))
    own = {node for node in joint.in_phase(Phase.FORWARD) if node.meta[Mark.SEGMENT] == without}
    kept = own & save_slot_inputs(joint)
    assert kept == (own if fused else set())


def test_as_text_the_backward_is_counted_on() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # forward, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # forward, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward, segment 1
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t: float32[8, 4] = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    t_1: float32[8, 8] = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # backward, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4] = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
"""
    made = after(cut_roundpipe_slots, before, RoundPipePartition(((0, 0),), (1, 1), ((0, 0),)), name="roundpipe_slots")
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
    # backward, stage 2, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4].strides(1, 8) = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
""",
    )


def test_as_text_one_fused_slot() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # forward, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # forward, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward, segment 1
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t: float32[8, 4] = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    t_1: float32[8, 8] = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # backward, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4] = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
"""
    made = after(cut_roundpipe_slots, before, RoundPipePartition((), (0, 1), ()), name="roundpipe_slots")
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
    # forward, stage 0, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward, stage 0, segment 1
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
