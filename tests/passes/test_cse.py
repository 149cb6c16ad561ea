from __future__ import annotations

import itertools
from typing import Any

import expecttest
import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.analysis.cost import cost_model
from roundpipe_fx.ir.joint_graph import JointGraph, is_view
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.cse import eliminate_common_subexpressions
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import save_everything
from tests import hugging_face
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step
from tests.graph_text import after

aten = torch.ops.aten


class Masked(nn.Module):
    """Each layer turns the mask into numbers, in one of several ways, and its gradient reads them."""

    def __init__(self, way: str = "", depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.way = way

    def numbers(self, mask: torch.Tensor) -> torch.Tensor:
        if self.way == "view":
            return mask.float().t()[None].squeeze(0)
        if self.way == "bits":
            return mask.float().view(torch.int32).float()
        if self.way == "drawn":
            return torch.rand_like(mask, dtype=torch.float32)
        if self.way == "through":
            return (mask.float() * 2).tanh()
        return mask.float()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        numbers = x
        for layer in self.layers:
            numbers = self.numbers(mask)
            x = (layer(x) * numbers).tanh()
        return (x.sum(), numbers) if self.way == "returned" else x.sum()


def annotated(way: str) -> JointGraph:
    joint = capture_joint(Masked(way), torch.randn(8, 8), torch.rand(8, 8) > 0.5)
    return annotate(joint, cost_model("roofline", torch.device("cpu"), None))


def count(joint: JointGraph, target: Any) -> int:
    return sum(node.target is target for node in joint.computed())


@pytest.mark.parametrize(
    ("way", "target", "before", "after"),
    [
        ("", aten._to_copy.default, 3, 1),
        ("view", aten._to_copy.default, 3, 1),
        ("through", aten.tanh.default, 6, 4),  # three are of the layers
        ("returned", aten._to_copy.default, 3, 2),  # what the caller gets is a tensor of its own
        ("drawn", aten.rand_like.default, 3, 3),
    ],
)
def test_one_serves_all(way: str, target: Any, before: int, after: int) -> None:
    joint = annotated(way)
    inputs = example_inputs(joint)
    torch.manual_seed(0)
    expected = run_joint(joint, inputs)
    assert count(joint, target) == before
    views = [node.name for node in joint.computed() if is_view(node)]
    eliminate_common_subexpressions(joint)
    joint.graph.lint()
    assert count(joint, target) == after
    assert {node.name for node in joint.computed() if is_view(node)} <= set(views)
    torch.manual_seed(0)
    for found, reference in zip(run_joint(joint, inputs), expected, strict=True):
        assert (found is None) == (reference is None)
        assert reference is None or (torch.equal(found, reference) and found.stride() == reference.stride())


def test_values_whose_bits_are_read_as_another_type_stay() -> None:
    joint = annotated("bits")
    kept = [node.name for node in joint.computed() if node.target is aten._to_copy.default]
    eliminate_common_subexpressions(joint)
    assert [node.name for node in joint.computed() if node.target is aten._to_copy.default] == [kept[0], kept[1]]


def test_what_is_not_pytorchs_own_is_not_taken_to_be_equal() -> None:
    @torch.library.custom_op("rpfx_equal::count", mutates_args=())
    def count_calls(x: torch.Tensor) -> torch.Tensor:
        return x.float()

    count_calls.register_fake(lambda x: torch.empty_like(x, dtype=torch.float32))

    class Counting(Masked):
        def numbers(self, mask: torch.Tensor) -> torch.Tensor:
            return count_calls(mask)

    joint = capture_joint(Counting(), torch.randn(8, 8), torch.rand(8, 8) > 0.5)
    joint = eliminate_common_subexpressions(annotate(joint, cost_model("roofline", torch.device("cpu"), None)))
    assert count(joint, torch.ops.rpfx_equal.count.default) == 3


def test_a_plan_that_keeps_everything_shares_and_others_do_not() -> None:
    model, batch = Masked(depth=6), {"x": torch.randn(8, 8), "mask": torch.rand(8, 8) > 0.5}
    reference = aot_eager_step(model, batch)
    step, compiled = compiled_step(model, batch, memory_budget=1.0)
    assert_bitwise(step, reference)
    plan = compiled.plan
    assert "".join(plan.sources().values()).count("aten._to_copy.default(") == 1
    with roundpipe_fx.measure_peak("cpu") as peak:
        compiled(**batch).backward()
    assert peak.bytes <= plan.peak_bytes < save_everything(Blocks(plan.operations)).peak.bytes
    points = plan.frontier()
    assert points[0] == (plan.peak_bytes, 0.0)
    assert all(more[0] > less[0] and more[1] < less[1] for more, less in itertools.pairwise(points))
    step, compiled = compiled_step(model, batch, memory_budget=plan.peak_bytes - 1)
    assert_bitwise(step, reference)
    assert compiled.plan.recompute_seconds > 0
    step, compiled = compiled_step(model, batch, memory_budget=plan.peak_bytes)
    assert_bitwise(step, reference)
    assert compiled.plan.recompute_seconds == 0 and compiled.plan.peak_bytes == plan.peak_bytes


@pytest.mark.long
def test_layers_of_a_llama_keep_one_mask() -> None:
    model, batch = hugging_face.llama(), hugging_face.language_batch()
    batch["attention_mask"] = (torch.arange(16) < torch.tensor([[16], [9]])).long()  # one that only a step knows
    step, compiled = compiled_step(model, batch, memory_budget=1.0)
    assert_bitwise(step, aot_eager_step(model, batch))
    assert compiled.plan.peak_bytes < save_everything(Blocks(compiled.plan.operations)).peak.bytes


def test_as_text_what_equals_an_earlier_value_is_that_one() -> None:
    before = """\
def joint(
    mask: bool[4, 8],
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward
    _to_copy: float32[4, 8] = aten._to_copy.default(mask, dtype=torch.float32)
    mul: float32[4, 8] = aten.mul.Tensor(x, _to_copy)
    _to_copy_1: float32[4, 8] = aten._to_copy.default(mask, dtype=torch.float32)
    mul_1: float32[4, 8] = aten.mul.Tensor(mul, _to_copy_1)
    # backward
    mul_2: float32[4, 8] = aten.mul.Tensor(tangents_1, _to_copy_1)
    mul_3: float32[4, 8] = aten.mul.Tensor(mul_2, _to_copy)
    return (mul_1,), (None, mul_3)
"""
    made = after(eliminate_common_subexpressions, before, name="cse")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    mask: bool[4, 8],
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward
    _to_copy: float32[4, 8] = aten._to_copy.default(mask, dtype=torch.float32)
    mul: float32[4, 8] = aten.mul.Tensor(x, _to_copy)
    mul_1: float32[4, 8] = aten.mul.Tensor(mul, _to_copy)
    # backward
    mul_2: float32[4, 8] = aten.mul.Tensor(tangents_1, _to_copy)
    mul_3: float32[4, 8] = aten.mul.Tensor(mul_2, _to_copy)
    return (mul_1,), (None, mul_3)
""",
    )


def test_as_text_what_is_drawn_is_no_equal() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward
    rand: float32[4, 8] = aten.rand_like.default(x)
    mul: float32[4, 8] = aten.mul.Tensor(x, rand)
    rand_1: float32[4, 8] = aten.rand_like.default(x)
    mul_1: float32[4, 8] = aten.mul.Tensor(mul, rand_1)
    # backward
    mul_2: float32[4, 8] = aten.mul.Tensor(tangents_1, rand_1)
    mul_3: float32[4, 8] = aten.mul.Tensor(mul_2, rand)
    return (mul_1,), (mul_3,)
"""
    made = after(eliminate_common_subexpressions, before, name="cse")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward
    rand: float32[4, 8] = aten.rand_like.default(x)
    mul: float32[4, 8] = aten.mul.Tensor(x, rand)
    rand_1: float32[4, 8] = aten.rand_like.default(x)
    mul_1: float32[4, 8] = aten.mul.Tensor(mul, rand_1)
    # backward
    mul_2: float32[4, 8] = aten.mul.Tensor(tangents_1, rand_1)
    mul_3: float32[4, 8] = aten.mul.Tensor(mul_2, rand)
    return (mul_1,), (mul_3,)
""",
    )
