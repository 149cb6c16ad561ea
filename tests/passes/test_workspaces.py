from __future__ import annotations

import expecttest
import pytest
import torch

from roundpipe_fx.ir.joint_graph import JointGraph, Mark
from roundpipe_fx.passes import workspaces
from roundpipe_fx.passes.workspaces import mark_workspaces
from tests.analysis.cost.test_workspace import Converting
from tests.capturing import capture_joint
from tests.graph_text import after

aten = torch.ops.aten
CPU = torch.device("cpu")
SIZE = 8 * 256 * 4
"""Bytes of the operand that the kernel of the product converts."""


def marked(joint: JointGraph) -> set:
    return {node.target for node in joint.computed() if node.meta.get(Mark.WORKSPACE, 0) >= SIZE}


def captured() -> JointGraph:
    return capture_joint(Converting(), torch.randn(8, 64), torch.ones(8, 256, dtype=torch.bfloat16))


def test_kernels_that_allocate_are_marked() -> None:
    assert marked(mark_workspaces(captured(), CPU, fused=False)) == {aten.mul.Tensor}


def test_what_is_fused_needs_nothing() -> None:
    assert not marked(mark_workspaces(captured(), CPU, fused=True))


def test_as_text_what_is_pointwise_needs_nothing() -> None:
    before = """\
def joint(
    x: float32[4, 8],
):
    # forward
    tanh: float32[4, 8] = aten.tanh.default(x)
    return (tanh,), ()
"""
    made = after(mark_workspaces, before, torch.device("cpu"), False, name="workspaces")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
):
    # forward
    tanh: float32[4, 8] = aten.tanh.default(x)
    return (tanh,), ()
""",
    )


def test_as_text_what_was_seen_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels of this machine need is not to be in the text."""
    monkeypatch.setattr(workspaces, "predict_workspaces", lambda nodes, *_: dict.fromkeys(nodes, 4096))
    before = """\
def joint(
    x: float32[4, 8],
):
    # forward
    sort: (float32[4, 8], int64[4, 8]) = aten.sort.default(x)
    getitem: float32[4, 8] = sort[0]
    return (getitem,), ()
"""
    made = after(mark_workspaces, before, torch.device("cpu"), False, name="workspaces")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
):
    # forward
    sort: (float32[4, 8], int64[4, 8]) = aten.sort.default(x)  # workspace: 4096
    getitem: float32[4, 8] = sort[0]  # workspace: 4096
    return (getitem,), ()
""",
    )


def test_as_text_a_gpu_that_is_not_there_has_formulas() -> None:
    before = """\
def joint(
    x: float32[8, 64],
    y: float32[8, 64],
):
    # forward
    softmax: float32[8, 64] = aten._softmax_backward_data.default(x, y, -1, torch.float32)
    cumsum: float32[8, 64] = aten.cumsum.default(softmax, 0)
    return (cumsum,), ()
"""
    made = after(mark_workspaces, before, torch.device("cuda"), False, None, False, name="workspaces")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[8, 64],
    y: float32[8, 64],
):
    # forward
    softmax: float32[8, 64] = aten._softmax_backward_data.default(x, y, -1, torch.float32)  # workspace: 2048
    cumsum: float32[8, 64] = aten.cumsum.default(softmax, 0)
    return (cumsum,), ()
""",
    )
