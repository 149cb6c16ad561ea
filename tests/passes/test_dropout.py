from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe_fx.ir.joint_graph import Mark, Phase, is_seeded, is_view
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.dropout import expand_dropout
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.graph_text import after
from tests.remat.graphs import CPU

aten = torch.ops.aten


class Dropped(nn.Module):
    def __init__(self, probability: float, dtype: torch.dtype = torch.float32, transposed: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5).to(dtype))
        self.probability = probability
        self.transposed = transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        y = F.dropout(y.t() if self.transposed else y, self.probability)
        return (y.view(-1) if not self.transposed else y).sin().sum()


def targets(joint) -> list:
    return [node.target for node in joint.computed()]


@settings(deadline=None, max_examples=25)
@given(
    st.floats(0.01, 0.99),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.integers(0, 5),
)
@pytest.mark.long
def test_bits_are_those_of_the_kernels(probability: float, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(6, 5).to(dtype)
    x[0, 0], x[0, 1] = float("inf"), float("nan")
    joint = capture_joint(Dropped(probability, dtype), x)
    inputs = example_inputs(joint)
    torch.manual_seed(seed)
    expected = run_joint(joint, inputs)
    state = torch.get_rng_state()
    expand_dropout(joint)
    assert aten.native_dropout.default not in targets(joint)
    assert aten.native_dropout_backward.default not in targets(joint)
    torch.manual_seed(seed)
    found = run_joint(joint, inputs)
    assert torch.equal(torch.get_rng_state(), state)
    for left, right in zip(found, expected, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            # As integers: zeros have a sign, and what is no number equals nothing.
            width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
            assert torch.equal(left.view(width), right.view(width))


def test_views_of_the_result_stay_views_and_the_mask_needs_no_operand() -> None:
    joint = annotate(expand_dropout(capture_joint(Dropped(0.5), torch.randn(6, 5))), CPU)
    (mask,) = (node for node in joint.computed() if is_seeded(node))
    (drawn_for,) = mask.all_input_nodes
    assert is_view(drawn_for) and drawn_for.all_input_nodes[0].target is aten.full.default
    (flat,) = (node for node in joint.computed() if node.target is aten.view.default and not node.meta["val"].dim() - 1)
    assert is_view(flat)


def test_dropping_all_stays_as_it_is() -> None:
    joint = capture_joint(Dropped(1.0), torch.randn(6, 5))
    before = targets(joint)
    assert aten.native_dropout.default in before
    assert aten.native_dropout.default in targets(expand_dropout(joint)) and aten.bernoulli.p not in targets(joint)


def test_operands_in_another_order_of_memory_stay_as_they_are() -> None:
    joint = expand_dropout(capture_joint(Dropped(0.5, transposed=True), torch.randn(6, 5)))
    assert aten.native_dropout.default in targets(joint) and aten.bernoulli.p not in targets(joint)


def test_a_result_is_made_again_from_a_mask_that_was_kept() -> None:
    """Without drawing: what the result needs is its operand and the mask."""
    joint = annotate(expand_dropout(capture_joint(Dropped(0.5), torch.randn(6, 5))), CPU)
    (mask,) = (node for node in joint.computed() if is_seeded(node))
    (masked, *_) = (user for user in mask.users if user.meta[Mark.PHASE] is Phase.FORWARD)
    (result,) = masked.users
    assert {masked.target, result.target} == {aten.mul.Tensor}
    assert mask in masked.all_input_nodes and len(masked.all_input_nodes) == 2
    assert result.all_input_nodes == [masked]


def test_as_text_a_mask_is_drawn_and_multiplied_by() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # captured
    native_dropout: (float32[4, 8], bool[4, 8]) = aten.native_dropout.default(x, 0.2, True)
    getitem: float32[4, 8] = native_dropout[0]
    getitem_1: bool[4, 8] = native_dropout[1]
    back: float32[4, 8] = aten.native_dropout_backward.default(tangents_1, getitem_1, 1.25)
    return (getitem,), (back,)
"""
    made = after(expand_dropout, before, name="dropout")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # captured
    full_default: bool[] = aten.full.default([], False, dtype=torch.bool, device=device(type='cpu'))
    expand_default: bool[4, 8].strides(0, 0) = aten.expand.default(full_default, [4, 8])
    bernoulli_p: bool[4, 8] = aten.bernoulli.p(expand_default, 0.8)
    mul_tensor: float32[4, 8] = aten.mul.Tensor(x, bernoulli_p)
    mul_tensor_1: float32[4, 8] = aten.mul.Tensor(mul_tensor, 1.25)
    mul_tensor_2: float32[4, 8] = aten.mul.Tensor(tangents_1, bernoulli_p)
    mul_tensor_3: float32[4, 8] = aten.mul.Tensor(mul_tensor_2, 1.25)
    return (mul_tensor_1,), (mul_tensor_3,)
""",
    )


def test_as_text_where_nothing_is_drawn_nothing_is_changed() -> None:
    before = """\
def joint(
    x: float32[4, 8],
):
    # captured
    neg: float32[4, 8] = aten.neg.default(x)
    return (neg,), ()
"""
    made = after(expand_dropout, before, name="dropout")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
):
    # captured
    neg: float32[4, 8] = aten.neg.default(x)
    return (neg,), ()
""",
    )
