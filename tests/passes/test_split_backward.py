from __future__ import annotations

import copy

import expecttest
import pytest
import torch

from roundpipe_fx.analysis.cost.roofline import DEVICES
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, input_nodes
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.apply_remat_schedule import apply_remat_schedule
from roundpipe_fx.passes.segments import cut_segments
from roundpipe_fx.passes.split_backward import split_backward
from roundpipe_fx.passes.stages import cut_stages
from roundpipe_fx.remat.save_policy import recompute_unsaved, save_all
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.golden_models import GOLDEN
from tests.graph_text import after
from tests.pipeline.steps import Blocks

CPU = DEVICES["cpu"]


def _joint(stages: int, run, *args, **kwargs) -> JointGraph:
    joint, segments = cut_segments(annotate(capture_joint(run, *args, **kwargs), CPU))
    joint, _ = cut_stages(joint, segments, min(stages, len(segments)), lambda size: 0.0)
    return apply_remat_schedule(joint, recompute_unsaved(joint, save_all(joint)), CPU)


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.filterwarnings("ignore:roundpipe_fx. stages=")
@pytest.mark.quick_every(3)
def test_nobody_waits_for_what_was_split_off(name: str, stages: int) -> None:
    make, make_batch, _ = GOLDEN[name]
    joint = split_backward(_joint(stages, make(), **make_batch()))
    weight = joint.in_phase(Phase.WEIGHT)
    assert weight
    for node in weight:
        for user in node.users:
            if user.op != "output":
                assert user.meta[Mark.PHASE] is Phase.WEIGHT and user.meta[Mark.STAGE] == node.meta[Mark.STAGE]
    # What stays is waited for: it leads to the backward of another stage or, where the backward ends, of a segment.
    both = [*joint.in_phase(Phase.BACKWARD), *weight]
    ends = min(node.meta[Mark.STAGE] for node in both)
    leads: set = set()
    for node in reversed(joint.in_phase(Phase.BACKWARD)):
        for user in node.users:
            if user.meta.get(Mark.PHASE) in (Phase.BACKWARD, Phase.WEIGHT):
                elsewhere = user.meta[Mark.STAGE] != node.meta[Mark.STAGE]
                earlier = user.meta[Mark.STAGE] == ends and user.meta[Mark.SEGMENT] < node.meta[Mark.SEGMENT]
                if user in leads or elsewhere or earlier:
                    leads.add(node)
    assert set(joint.in_phase(Phase.BACKWARD)) == leads


def test_the_matrix_products_of_parameters_are_split_off() -> None:
    joint = split_backward(_joint(2, Blocks(depth=4), torch.randn(4, 16)))
    products = [node for node in joint.computed() if node.meta.get(Mark.FLOPS)]
    by_phase = {phase: sum(node.meta[Mark.PHASE] is phase for node in products) for phase in Phase}
    assert by_phase[Phase.FORWARD] == 8
    # One for each weight; the first layer's input needs no gradient.
    assert by_phase[Phase.BACKWARD] + by_phase[Phase.WEIGHT] == 15
    assert by_phase[Phase.WEIGHT] >= 8


def test_nothing_that_is_computed_changes() -> None:
    joint = _joint(2, Blocks(depth=4), torch.randn(4, 16))
    inputs = example_inputs(joint)
    expected = run_joint(joint, copy.deepcopy(inputs))
    found = run_joint(split_backward(joint), inputs)
    for left, right in zip(found, expected, strict=True):
        assert left is right is None or torch.equal(left, right)


def test_an_input_that_is_differentiated_is_no_stages_business() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    joint = split_backward(_joint(2, Blocks(depth=2), x))
    for node in joint.in_phase(Phase.BACKWARD):
        reads = [source for source in input_nodes(node) if Mark.PHASE in source.meta]
        assert all(source.meta[Mark.PHASE] is not Phase.WEIGHT for source in reads)


def test_as_text_gradients_of_parameters_are_put_off() -> None:
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
    made = after(split_backward, before, name="split_backward")
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
    # weight, stage 1, segment 1
    t: float32[8, 4].strides(1, 8) = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    # backward, stage 1, segment 1
    t_1: float32[8, 8].strides(1, 8) = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # weight, stage 0, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4].strides(1, 8) = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
""",
    )


def test_as_text_in_one_stage_what_leads_to_an_earlier_segment_is_not() -> None:
    before = """\
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
    made = after(split_backward, before, name="split_backward")
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
    # weight, stage 0, segment 1
    t: float32[8, 4].strides(1, 8) = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    # backward, stage 0, segment 1
    t_1: float32[8, 8].strides(1, 8) = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # weight, stage 0, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4].strides(1, 8) = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
""",
    )
