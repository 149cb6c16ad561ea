from __future__ import annotations

import expecttest
import pytest
import torch
from torch import nn

from roundpipe_fx.analysis.cost.roofline import DEVICES
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase
from roundpipe_fx.operators.gradient_sums import SUMMING, add_copy_to, add_product_to
from roundpipe_fx.passes.accumulate_gradients import accumulate_gradients
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.apply_remat_schedule import apply_remat_schedule
from roundpipe_fx.passes.redundant_views import remove_redundant_views
from roundpipe_fx.passes.segments import cut_segments
from roundpipe_fx.passes.split_backward import split_backward
from roundpipe_fx.passes.stages import cut_stages
from roundpipe_fx.passes.tied_gradients import split_tied_gradients
from roundpipe_fx.remat.save_policy import recompute_unsaved, save_all
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.golden_models import GOLDEN
from tests.graph_text import after
from tests.pipeline.steps import Blocks

CPU = DEVICES["cpu"]


def _joint(model: nn.Module, *args: object, split: bool = False, **kwargs: object) -> JointGraph:
    joint, segments = cut_segments(annotate(remove_redundant_views(capture_joint(model, *args, **kwargs)), CPU))
    joint, _ = cut_stages(joint, segments, min(2, len(segments)), lambda size: 0.0)
    joint = apply_remat_schedule(joint, recompute_unsaved(joint, save_all(joint)), CPU)
    return split_backward(joint) if split else joint


def _summed(joint: JointGraph, target: object = None) -> set[str]:
    return {
        joint.label(primal)
        for primal, node in zip(joint.primals, joint.gradients, strict=True)
        if isinstance(node, torch.fx.Node) and (node.target is target if target else node.target in SUMMING)
    }


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["dropout_mlp", "tied_transformer", "unet", "encoder_decoder"])
@pytest.mark.quick_every(3)
def test_sums_begin_with_the_gradients_and_grow_by_them(name: str, split: bool) -> None:
    make, make_batch, _ = GOLDEN[name]
    joint = _joint(make(), split=split, **make_batch())
    inputs = example_inputs(joint)
    torch.manual_seed(0)
    before = run_joint(joint, inputs)
    joint = accumulate_gradients(joint, CPU)
    assert joint.sums and len(joint.inputs) == len(inputs) + len(joint.sums)
    torch.manual_seed(0)
    first = run_joint(joint, [*inputs, *[None] * len(joint.sums)])
    assert all(a is b or torch.equal(a, b) for a, b in zip(first, before, strict=True))
    totals = [torch.randn(node.meta["val"].shape) for node in joint.sums]
    given = {node: total.clone() for node, total in zip(joint.sums, totals, strict=True)}
    expected = dict(zip(joint.sums, totals, strict=True))
    torch.manual_seed(0)
    later = run_joint(joint, [*inputs, *given.values()])
    for node, gradient, found in zip(joint.outputs, before, later, strict=True):
        if isinstance(node, torch.fx.Node) and node.target in SUMMING:
            assert found is given[node.args[0]]  # in place
            if node.target is not add_product_to:
                assert torch.equal(found, expected[node.args[0]] + gradient)
            else:
                wanted = expected[node.args[0]] + gradient
                assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()
        else:
            assert found is gradient or torch.equal(found, gradient)


@pytest.mark.parametrize("split", [False, True])
def test_every_parameters_gradient_is_added_where_it_is_made(split: bool) -> None:
    joint = accumulate_gradients(_joint(Blocks(), torch.randn(4, 16), split=split), CPU)
    names = {name for name, _ in Blocks().named_parameters()}
    assert _summed(joint) == names
    for node in joint.computed():
        if node.target in SUMMING:
            made = node.args[1]
            assert node.meta[Mark.STAGE] == made.meta[Mark.STAGE]
            assert node.meta[Mark.PHASE] is (Phase.WEIGHT if split else Phase.BACKWARD)
            assert node.meta[Mark.SECONDS] > 0
            assert (node.target is add_product_to) == (node.meta["val"].dim() == 2)


def test_what_others_hold_or_what_is_part_of_something_is_copied() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.left, self.right = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
            self.spread = nn.Parameter(torch.randn(4))
            self.pieces = nn.ParameterList(torch.randn(2, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x) + self.left + self.right  # one gradient, of both
            joined = torch.cat(list(self.pieces))  # two halves of one
            return (torch.tanh(x) @ joined.t()).sum() + self.spread.sum()  # one number, four times

    model = Model()
    joint = _joint(model, torch.randn(3, 4))
    inputs = example_inputs(joint)
    before = run_joint(joint, inputs)
    joint = accumulate_gradients(joint, CPU)
    names = {name for name, _ in model.named_parameters()}
    assert _summed(joint) == names
    assert _summed(joint, add_copy_to) == names - {"layer.weight", "layer.bias"}
    found = run_joint(joint, [*inputs, *[None] * len(joint.sums)])
    assert all(a is b or torch.equal(a, b) for a, b in zip(found, before, strict=True))
    storages = [value.untyped_storage() for value in found if value is not None]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    gradients = [value for value in found[joint.num_forward_outputs :] if value is not None]
    assert all(value.untyped_storage().nbytes() == 4 * value.numel() for value in gradients)


def test_gradients_of_inputs_are_not_added_up() -> None:
    joint = accumulate_gradients(_joint(Blocks(), torch.randn(4, 16, requires_grad=True)), CPU)
    assert len(_summed(joint)) == len(list(Blocks().parameters()))
    assert sum(isinstance(node, torch.fx.Node) for node in joint.gradients) == len(_summed(joint)) + 1


def test_parts_that_one_module_makes_are_added_to_one_sum() -> None:
    make, make_batch, _ = GOLDEN["tied_transformer"]
    for stages in (1, 2):
        joint = annotate(split_tied_gradients(remove_redundant_views(capture_joint(make(), **make_batch()))), CPU)
        assert len(joint.parts) == 1
        joint, segments = cut_segments(joint)
        joint, _ = cut_stages(joint, segments, stages, lambda size: 0.0)
        joint = apply_remat_schedule(joint, recompute_unsaved(joint, save_all(joint)), CPU)
        inputs = example_inputs(joint)
        torch.manual_seed(0)
        before = run_joint(joint, inputs)
        first, owner = joint.num_forward_outputs, joint.parts[0]
        wanted = before[first + owner] + before[-1]
        joint = accumulate_gradients(joint, CPU)
        assert len(joint.parts) == stages - 1
        torch.manual_seed(0)
        after = run_joint(joint, [*inputs, *[None] * len(joint.sums)])
        found = after[first + owner] if stages == 1 else after[first + owner] + after[-1]
        assert torch.equal(found, wanted)
        total = torch.ones_like(wanted)
        given = [total if "embedding" in joint.label(node) else None for node in joint.sums]
        if stages == 1:
            torch.manual_seed(0)
            found = run_joint(joint, [*inputs, *given])[first + owner]
            assert found is total
            assert (found - 1 - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_as_text_a_product_is_added_to_the_sum() -> None:
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
    t_1: float32[8, 8] = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # backward, stage 0, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4] = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_4)
"""
    made = after(accumulate_gradients, before, CPU, name="accumulate_gradients")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
    sums_1: float32[8, 8],
):
    # forward, stage 0, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # forward, stage 1, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward, stage 1, segment 1
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t_1: float32[8, 8].strides(1, 8) = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # backward, stage 0, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4].strides(1, 8) = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    added: float32[8, 8] = add_product_to(sums_1, t_2, tanh_backward)
    return (exp,), (None, added)
""",
    )


def test_as_text_a_compiler_is_given_additions() -> None:
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
    t_1: float32[8, 8] = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # backward, stage 0, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4] = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_4)
"""
    made = after(accumulate_gradients, before, CPU, False, name="accumulate_gradients")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
    sums_1: float32[8, 8],
):
    # forward, stage 0, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # forward, stage 1, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward, stage 1, segment 1
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t_1: float32[8, 8].strides(1, 8) = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    # backward, stage 0, segment 0
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4].strides(1, 8) = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    added: float32[8, 8] = add_product_to(sums_1, t_2, tanh_backward)  # workspace: 256
    return (exp,), (None, added)
""",
    )
