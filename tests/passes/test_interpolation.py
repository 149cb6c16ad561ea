from __future__ import annotations

import itertools
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from roundpipe_fx.passes.interpolation import restore_interpolation
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.comparison import aot_eager_step, assert_bitwise, train_step
from tests.graph_text import after

aten = torch.ops.aten


class Enlarged(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, **how: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 1).to(dtype))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight.view(3, *([1] * (x.dim() - 2)))
        return F.interpolate(x, **self.how).sin().sum()


def names(joint: Any) -> set[str]:
    return {
        node.target._schema.name.removeprefix("aten::") for node in joint.computed() if hasattr(node.target, "_schema")
    }


SIZES = [{"scale_factor": 2}, {"scale_factor": 3}, {"scale_factor": 1.5}, {"size": 11}, {"scale_factor": 0.5}]


@pytest.mark.parametrize(
    ("how", "dtype"), [*((how, torch.float32) for how in SIZES), ({"scale_factor": 1.5}, torch.bfloat16)], ids=str
)
@pytest.mark.quick_every(2)
def test_bits_are_those_of_indexing(how: dict[str, Any], dtype: torch.dtype) -> None:
    for space, mode in itertools.product([(7,), (8, 5), (3, 4, 5)], ["nearest", "nearest-exact"]):
        torch._dynamo.reset()
        joint = capture_joint(Enlarged(dtype, mode=mode, **how), torch.randn(2, 3, *space).to(dtype))
        inputs = example_inputs(joint)
        expected = run_joint(joint, inputs)
        assert "_unsafe_index" not in names(restore_interpolation(joint))
        for found, reference in zip(run_joint(joint, inputs), expected, strict=True):
            assert (found is None) == (reference is None)
            if reference is not None:
                assert torch.equal(found, reference) and found.stride() == reference.stride()


@pytest.mark.parametrize(
    ("how", "kernel"),
    [
        ({"scale_factor": 2}, "upsample_nearest2d"),
        ({"mode": "nearest-exact", "scale_factor": 1.5}, "_upsample_nearest_exact2d"),
    ],
)
def test_tables_are_gone(how: dict[str, Any], kernel: str) -> None:
    joint = capture_joint(Enlarged(**how), torch.randn(2, 3, 8, 4))
    assert {"_unsafe_index", "_unsafe_index_put", "arange"} <= names(joint)
    found = names(restore_interpolation(joint))
    assert {kernel, f"{kernel}_backward"} <= found
    assert not found & {"_unsafe_index", "_unsafe_index_put", "arange"}


def test_other_tables_stay() -> None:
    class Mirrored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            index = torch.arange(7, -1, -1)
            return aten._unsafe_index(x * self.weight, [None, None, index[:, None], index]).sin().sum()

    joint = capture_joint(Mirrored(), torch.randn(2, 3, 8, 8))
    assert "_unsafe_index" in names(restore_interpolation(joint))
    assert "upsample_nearest2d" not in names(joint)


def test_another_order_of_memory_stays() -> None:
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    joint = restore_interpolation(capture_joint(Enlarged(scale_factor=2), x))
    assert "upsample_nearest2d_backward" not in names(joint)  # its gradient would lie otherwise
    model, batch = Enlarged(scale_factor=2), {"x": x}
    reference = aot_eager_step(model, batch)
    torch._dynamo.reset()
    assert_bitwise(train_step(roundpipe_fx.compile(model), model, batch), reference)


def test_sizes_that_are_symbols_stay() -> None:
    model = Enlarged(scale_factor=2)
    compiled = roundpipe_fx.compile(model, dynamic=True, fullgraph=True)
    for size in (4, 6):
        batch = {"x": torch.randn(2, 3, size, size)}
        assert_bitwise(train_step(compiled, model, batch), aot_eager_step(model, batch))


def test_as_text_a_table_of_nearest_neighbours_is_a_kernel() -> None:
    before = """\
def joint(
    x: float32[2, 3, 4],
):
    # captured
    arange: float32[8] = aten.arange.default(8, dtype=torch.float32, device=device(type='cpu'), pin_memory=False)
    mul: float32[8] = aten.mul.Tensor(arange, 0.5)
    _to_copy: int64[8] = aten._to_copy.default(mul, dtype=torch.int64)
    _unsafe_index: float32[2, 3, 8] = aten._unsafe_index.Tensor(x, [None, None, _to_copy])
    return (_unsafe_index,), ()
"""
    expecttest.assert_expected_inline(
        after(restore_interpolation, before, name="interpolation"),
        """\
def joint(
    x: float32[2, 3, 4],
):
    # captured
    upsample_nearest1d_default: float32[2, 3, 8] = aten.upsample_nearest1d.default(x, [8])
    return (upsample_nearest1d_default,), ()
""",
    )


def test_as_text_its_gradient_is_one_too() -> None:
    before = """\
def joint(
    tangents_1: float32[2, 3, 8],
):
    # captured
    arange: float32[8] = aten.arange.default(8, dtype=torch.float32, device=device(type='cpu'), pin_memory=False)
    mul: float32[8] = aten.mul.Tensor(arange, 0.5)
    _to_copy: int64[8] = aten._to_copy.default(mul, dtype=torch.int64)
    new_zeros: float32[2, 3, 4] = aten.new_zeros.default(tangents_1, [2, 3, 4], dtype=torch.float32, layout=torch.strided, device=device(type='cpu'))
    _unsafe_index_put: float32[2, 3, 4] = aten._unsafe_index_put.default(new_zeros, [None, None, _to_copy], tangents_1, True)
    return (), (_unsafe_index_put,)
"""
    expecttest.assert_expected_inline(
        after(restore_interpolation, before, name="interpolation"),
        """\
def joint(
    tangents_1: float32[2, 3, 8],
):
    # captured
    upsample_nearest1d_backward_default: float32[2, 3, 4] = aten.upsample_nearest1d_backward.default(tangents_1, [8], [2, 3, 4])
    return (), (upsample_nearest1d_backward_default,)
""",
    )


def test_as_text_a_table_that_no_kernel_reads_stays() -> None:
    before = """\
def joint(
    x: float32[2, 3, 4],
):
    # captured
    arange: float32[8] = aten.arange.default(8, dtype=torch.float32, device=device(type='cpu'), pin_memory=False)
    mul: float32[8] = aten.mul.Tensor(arange, 0.25)
    _to_copy: int64[8] = aten._to_copy.default(mul, dtype=torch.int64)
    _unsafe_index: float32[2, 3, 8] = aten._unsafe_index.Tensor(x, [None, None, _to_copy])
    return (_unsafe_index,), ()
"""
    expecttest.assert_expected_inline(
        after(restore_interpolation, before, name="interpolation"),
        """\
def joint(
    x: float32[2, 3, 4],
):
    # captured
    arange: float32[8] = aten.arange.default(8, dtype=torch.float32, device=device(type='cpu'), pin_memory=False)
    mul: float32[8] = aten.mul.Tensor(arange, 0.25)
    _to_copy: int64[8] = aten._to_copy.default(mul, dtype=torch.int64)
    _unsafe_index: float32[2, 3, 8] = aten._unsafe_index.Tensor(x, [None, None, _to_copy])
    return (_unsafe_index,), ()
""",
    )
