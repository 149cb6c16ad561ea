from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import roundpipe_fx
from roundpipe_fx.ir.text import joint_text
from roundpipe_fx.passes.average_pooling import divide_by_counts
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.comparison import eager_step, train_step
from tests.graph_text import after

aten = torch.ops.aten
POOLS = {2: F.avg_pool2d, 3: F.avg_pool3d}
BEYOND: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "half": ((5, 5), {"kernel_size": 2}),
    "overlapping": ((6, 6), {"kernel_size": 3, "stride": 2}),
    "padded": ((6, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "padded and overlapping": ((9, 8), {"kernel_size": (4, 5), "stride": (3, 2), "padding": (1, 2)}),
    "larger than the input": ((2, 3), {"kernel_size": 16}),
    "in space": ((5, 4, 6), {"kernel_size": 2}),
    "in space and padded": ((6, 5, 6), {"kernel_size": 3, "stride": 2, "padding": 1}),
}
WITHIN: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "whole windows": ((6, 6), {"kernel_size": 2}),
    "padding left out": ((6, 6), {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}),
    "a divisor": ((5, 5), {"kernel_size": 2, "divisor_override": 3}),
    "rounded down": ((5, 5), {"kernel_size": 2, "ceil_mode": False}),
}


class Pooled(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1))
        self.how = {"ceil_mode": True, **how}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        space = x.dim() - 2
        return POOLS[space](x * self.weight.view(3, *[1] * space), **self.how).sin().sum()


@pytest.mark.parametrize("name", BEYOND)
def test_gradients_are_those_of_eager(name: str) -> None:
    """To the bit, where PyTorch's kernels run both graphs."""
    space, how = BEYOND[name]
    x = torch.randn(2, 3, *space, dtype=torch.float64)
    model = Pooled(**how).double()
    joint = capture_joint(model, x)
    before, inputs = joint_text(joint), example_inputs(joint)
    expected = run_joint(joint, inputs)
    assert joint_text(divide_by_counts(joint)) != before
    for value, reference in zip(run_joint(joint, inputs), expected, strict=True):
        assert (value is None and reference is None) or torch.equal(value, reference)


@pytest.mark.parametrize("name", WITHIN)
def test_others_stay(name: str) -> None:
    space, how = WITHIN[name]
    joint = capture_joint(Pooled(**how), torch.randn(2, 3, *space))
    before = joint_text(joint)
    assert joint_text(divide_by_counts(joint)) == before


@pytest.mark.parametrize("name", ["half", pytest.param("padded", marks=pytest.mark.long)])
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_compiled_stages_have_the_gradients_of_eager(name: str, dynamic: bool) -> None:
    space, how = BEYOND[name]
    model, x = Pooled(**how).double(), torch.randn(2, 3, *space, dtype=torch.float64)
    reference = eager_step(model, {"x": x})
    compiled = roundpipe_fx.compile(model, stage_compiler="inductor", dynamic=dynamic)
    torch.testing.assert_close(train_step(compiled, compiled, {"x": x}).gradients, reference.gradients)
    if dynamic:
        x = torch.randn(2, 3, *(size + 2 for size in space), dtype=torch.float64)
        torch.testing.assert_close(
            train_step(compiled, compiled, {"x": x}).gradients, eager_step(model, {"x": x}).gradients
        )


def test_as_text_padding_is_left_out_where_there_is_none() -> None:
    made = after(
        divide_by_counts,
        """\
def joint(
    x: float32[1, 1, 8, 7],
    tangents_1: float32[1, 1, 3, 3],
):
    pool: float32[1, 1, 8, 7] = aten.avg_pool2d_backward.default(tangents_1, x, [3, 3], [], [0, 0], True, True, None)
    return (), (pool,)
""",
    )
    assert_expected_inline(
        made,
        """\
def joint(
    x: float32[1, 1, 8, 7],
    tangents_1: float32[1, 1, 3, 3],
):
    # captured
    pool: float32[1, 1, 8, 7] = aten.avg_pool2d_backward.default(tangents_1, x, [3, 3], [], [0, 0], True, False, None)
    return (), (pool,)
""",
    )


def test_as_text_gradients_are_divided_by_counts() -> None:
    made = after(
        divide_by_counts,
        """\
def joint(
    x: float32[1, 1, 6, 6],
    tangents_1: float32[1, 1, 4, 4],
):
    pool: float32[1, 1, 6, 6] = aten.avg_pool2d_backward.default(tangents_1, x, [3], [2], [1], True, True, None)
    return (), (pool,)
""",
    )
    assert_expected_inline(
        made,
        """\
def joint(
    x: float32[1, 1, 6, 6],
    tangents_1: float32[1, 1, 4, 4],
):
    # captured
    arange_default: int64[4] = aten.arange.default(4, device=device(type='cpu'))
    mul_tensor: int64[4] = aten.mul.Tensor(arange_default, -2)
    add_tensor: int64[4] = aten.add.Tensor(mul_tensor, 8)
    clamp_max_default: int64[4] = aten.clamp_max.default(add_tensor, 3)
    view_default: int64[4, 1] = aten.view.default(clamp_max_default, [-1, 1])
    arange_default_1: int64[4] = aten.arange.default(4, device=device(type='cpu'))
    mul_tensor_1: int64[4] = aten.mul.Tensor(arange_default_1, -2)
    add_tensor_1: int64[4] = aten.add.Tensor(mul_tensor_1, 8)
    clamp_max_default_1: int64[4] = aten.clamp_max.default(add_tensor_1, 3)
    view_default_1: int64[4] = aten.view.default(clamp_max_default_1, [-1])
    mul_tensor_2: int64[4, 4] = aten.mul.Tensor(view_default, view_default_1)
    div_tensor: float32[1, 1, 4, 4] = aten.div.Tensor(tangents_1, mul_tensor_2)
    pool: float32[1, 1, 6, 6] = aten.avg_pool2d_backward.default(div_tensor, x, [3], [2], [1], True, True, 1)
    return (), (pool,)
""",
    )
