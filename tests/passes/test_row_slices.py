from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from roundpipe_fx.analysis.cost import cost_model
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.row_slices import slice_narrow_values
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.graph_text import CPU, after

LAST_LEFT_OUT = """
def joint(
    primals_1: float32[8, 4],
    primals_2: float32[4, 64],  # parameter
    tangents_1: float32[2, 3, 64],
):
    # forward
    mm: float32[8, 64] = aten.mm.default(primals_1, primals_2)
    tanh: float32[8, 64] = aten.tanh.default(mm)
    view: float32[2, 4, 64] = aten.view.default(tanh, [2, 4, 64])
    some: float32[2, 3, 64].strides(256, 64, 1) = aten.slice.Tensor(view, 1, 0, -1)
    out: float32[2, 3, 64] = aten.neg.default(some)
    # backward
    back: float32[2, 3, 64] = aten.neg.default(tangents_1)
    zeros: float32[2, 4, 64] = aten.slice_backward.default(back, [2, 4, 64], 1, 0, -1, 1)
    flat: float32[8, 64] = aten.view.default(zeros, [8, 64])
    tanh_backward: float32[8, 64] = aten.tanh_backward.default(flat, tanh)
    t: float32[64, 4].strides(1, 64) = aten.t.default(primals_2)
    narrow: float32[8, 4] = aten.mm.default(tanh_backward, t)
    across: float32[4, 8].strides(1, 4) = aten.t.default(primals_1)
    weight: float32[4, 64] = aten.mm.default(across, tanh_backward)
    return (out,), (narrow, weight)
"""


def test_as_text_narrow_values_are_sliced() -> None:
    expecttest.assert_expected_inline(
        after(slice_narrow_values, LAST_LEFT_OUT, CPU, name="row_slices"),
        """\
def joint(
    primals_1: float32[8, 4],
    primals_2: float32[4, 64],  # parameter
    tangents_1: float32[2, 3, 64],
):
    # forward
    view_default_2: float32[2, 4, 4] = aten.view.default(primals_1, [2, 4, 4])
    slice_tensor_1: float32[2, 3, 4].strides(16, 4, 1) = aten.slice.Tensor(view_default_2, 1, 0, -1)
    clone_default: float32[2, 3, 4] = aten.clone.default(slice_tensor_1, memory_format=torch.contiguous_format)
    view_default_3: float32[6, 4] = aten.view.default(clone_default, [6, 4])
    mm: float32[6, 64] = aten.mm.default(view_default_3, primals_2)
    tanh: float32[6, 64] = aten.tanh.default(mm)
    view: float32[2, 3, 64] = aten.view.default(tanh, [2, 3, 64])
    out: float32[2, 3, 64] = aten.neg.default(view)
    # backward
    back: float32[2, 3, 64] = aten.neg.default(tangents_1)
    flat: float32[6, 64] = aten.view.default(back, [6, 64])
    tanh_backward: float32[6, 64] = aten.tanh_backward.default(flat, tanh)
    t: float32[64, 4].strides(1, 64) = aten.t.default(primals_2)
    narrow: float32[6, 4] = aten.mm.default(tanh_backward, t)
    view_default_6: float32[2, 3, 4] = aten.view.default(narrow, [2, 3, 4])
    slice_backward_default_1: float32[2, 4, 4] = aten.slice_backward.default(view_default_6, [2, 4, 4], 1, 0, -1, 1)
    view_default_7: float32[8, 4] = aten.view.default(slice_backward_default_1, [8, 4])
    across: float32[4, 8].strides(1, 4) = aten.t.default(primals_1)
    view_default_4: float32[4, 2, 4].strides(1, 16, 4) = aten.view.default(across, [4, 2, 4])
    slice_tensor_2: float32[4, 2, 3].strides(1, 16, 4) = aten.slice.Tensor(view_default_4, 2, 0, -1)
    clone_default_1: float32[4, 2, 3] = aten.clone.default(slice_tensor_2, memory_format=torch.contiguous_format)
    view_default_5: float32[4, 6] = aten.view.default(clone_default_1, [4, 6])
    weight: float32[4, 64] = aten.mm.default(view_default_5, tanh_backward)
    return (out,), (view_default_7, weight)
""",
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return (out,)", "return (view,)"),
        ("aten.tanh.default(mm)", "aten.cumsum.default(mm, 0)"),
        ("aten.tanh_backward.default(flat, tanh)", "aten.add.Tensor(flat, tanh)"),
        ("aten.view.default(tanh, [2, 4, 64])", "aten.view.default(primals_3, [2, 4, 64])"),
        ("out: float32[2, 3, 64] = aten.neg.default(some)", "out: bool[2, 3, 64] = aten.gt.Scalar(some, 0)"),
    ],
    ids=["read elsewhere", "rows depend on others", "not zero where rows are left out", "an input", "a comparison"],
)
def test_as_text_others_stay(old: str, new: str) -> None:
    text = LAST_LEFT_OUT.replace(old, new)
    if "primals_3" in new:
        text = text.replace("    tangents_1", "    primals_3: float32[8, 64],\n    tangents_1").replace(
            "(narrow, weight)", "(narrow, weight, None)"
        )
    assert after(slice_narrow_values, text, CPU, name="row_slices").split() == text.split()


class Sliced(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.head, self.kind = nn.LayerNorm(8), nn.Linear(8, 96, bias=kind == "bias"), kind
        self.head.weight.requires_grad_(kind != "frozen")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(x))
        match self.kind:
            case "step":
                logits, y = logits[:, 1:-1:2], y[:, 1:-1:2]
            case "of the first dimension":
                logits, y = logits[:-1], y[1:]
            case "twice":
                logits, y = logits[1:, :-2], y[1:, 2:]
            case "transposed":
                return F.cross_entropy(logits.transpose(1, 2)[..., 1:], y[:, 1:])
            case _:
                logits, y = logits[:, :-1], y[:, 1:]
        return F.cross_entropy(logits.reshape(-1, 96), y.reshape(-1))


KINDS = ["plain", "bias", "frozen", "step", "of the first dimension", "twice", "transposed"]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_stay_the_same(kind: str) -> None:
    """Values lie in memory as is noted, and nothing wide is sliced."""
    batch = torch.randn(4, 6, 8, dtype=torch.float64), torch.randint(0, 96, (4, 6))
    joint = capture_joint(Sliced(kind).double(), *batch)
    inputs, device = example_inputs(joint), torch.device("cpu")
    before = run_joint(joint, inputs)
    annotate(joint, cost_model("roofline", device))
    changed = slice_narrow_values(joint, CPU, device)
    for one, other in zip(before, run_joint(changed, inputs), strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
            assert one.stride() == other.stride()
    AsNoted(changed.module).run(*inputs)
    for node in changed.computed():
        if node.target in (torch.ops.aten.slice.Tensor, torch.ops.aten.slice_backward.default):
            assert 96 not in node.meta["val"].shape


def test_sizes_that_vary_are_not_fixed() -> None:
    batch = torch.randn(4, 6, 8), torch.randint(0, 96, (4, 6))
    for value in batch:
        torch._dynamo.mark_dynamic(value, 1)
    joint = capture_joint(Sliced("plain"), *batch)
    annotate(joint, CPU)
    (sliced,) = (node for node in joint.computed() if node.target is torch.ops.aten.slice.Tensor and 96 in _shape(node))
    shape_env = sliced.meta["val"].fake_mode.shape_env
    before = len(shape_env.guards)
    slice_narrow_values(joint, CPU)
    assert sliced in joint.computed() and isinstance(sliced.meta["val"].shape[1], torch.SymInt)
    assert len(shape_env.guards) == before


def _shape(node: fx.Node) -> list[Any]:
    return list(node.meta["val"].shape)


class AsNoted(fx.Interpreter):
    """Holds values against fake ones."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and n.op == "call_function":
            assert (value.shape, value.stride()) == (n.meta["val"].shape, n.meta["val"].stride()), n
        return value
