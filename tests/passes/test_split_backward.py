from __future__ import annotations

import copy

import pytest
import torch

from roundpipe_fx.analysis.cost.roofline import DEVICES
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, input_nodes
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.apply_remat_schedule import apply_remat_schedule
from roundpipe_fx.passes.segments import cut_segments
from roundpipe_fx.passes.split_backward import split_backward
from roundpipe_fx.passes.stages import cut_stages
from roundpipe_fx.remat.save_policy import recompute_rest, save_all
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.golden_models import GOLDEN
from tests.pipeline.steps import Blocks

CPU = DEVICES["cpu"]


def _joint(stages: int, run, *args, **kwargs) -> JointGraph:
    joint, segments = cut_segments(annotate(capture_joint(run, *args, **kwargs), CPU))
    joint, _ = cut_stages(joint, segments, min(stages, len(segments)), lambda size: 0.0)
    return apply_remat_schedule(joint, recompute_rest(joint, save_all(joint)), CPU)


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.filterwarnings("ignore:roundpipe_fx. stages=")
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
