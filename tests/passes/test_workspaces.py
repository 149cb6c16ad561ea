from __future__ import annotations

import torch

from roundpipe_fx.ir.joint_graph import JointGraph, Mark
from roundpipe_fx.passes.workspaces import mark_workspaces
from tests.analysis.cost.test_workspace import Converting
from tests.capturing import capture_joint

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
