from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from roundpipe_fx.analysis.cost import DEVICES
from roundpipe_fx.ir.joint_graph import Mark, Phase
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.fuse_costs import fuse_costs
from tests.capturing import capture_joint
from tests.graph_text import joint_of
from tests.remat.graphs import CPU


class Pointwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return F.linear(y.sin().exp().cos(), self.layer.weight).sum()


def test_what_is_fused_costs_what_it_adds() -> None:
    joint = annotate(capture_joint(Pointwise(), torch.randn(256, 64)), CPU)
    before = {node.name: node.meta[Mark.SECONDS] for node in joint.computed()}
    fuse_costs(joint, CPU)
    after = {node.name: node.meta[Mark.SECONDS] for node in joint.in_phase(Phase.FORWARD)}
    size = 256 * 64 * 4
    # The first reads from memory and launches, the one in the middle does neither, the last writes.
    assert abs(after["sin"] - (size / CPU.bandwidth + CPU.overhead)) < before["sin"] * 0.6
    assert after["exp"] == 0.0
    assert 0 < after["cos"] < before["cos"]
    assert all(after[name] == before[name] for name in after if "mm" in name)


def test_on_a_gpu_a_norm_reads_and_writes_once() -> None:
    rows, width = 4096, 2048
    norm = nn.RMSNorm(width, eps=1e-6).bfloat16()
    h200 = DEVICES["H200"]
    joint = annotate(capture_joint(norm, torch.empty(rows, width, dtype=torch.bfloat16, requires_grad=True)), h200)
    fuse_costs(joint, h200)
    forward = sum(node.meta[Mark.SECONDS] for node in joint.in_phase(Phase.FORWARD))
    once = h200.seconds(0, 2 * 2 * rows * width)
    assert once <= forward <= once + 4 * h200.overhead


def test_on_a_gpu_a_softmax_of_long_rows_reads_them_twice() -> None:
    h200 = DEVICES["H200"]
    for classes, reads in ((1 << 10, 1), (1 << 17, 2)):
        logits = torch.empty(1 << 24 >> (classes.bit_length() - 1), classes, dtype=torch.bfloat16, requires_grad=True)
        joint = annotate(capture_joint(lambda x: F.log_softmax(x.float(), -1), logits), h200)
        fuse_costs(joint, h200)
        seconds = sum(node.meta[Mark.SECONDS] for node in joint.in_phase(Phase.FORWARD))
        expected = (2 * reads + 4) * logits.numel() / h200.bandwidth
        assert expected <= seconds <= expected + 3 * h200.overhead


FUSED = """\
def joint(
    x: float32[4, 8],
):
    # forward
    exp: float32[4, 8] = aten.exp.default(x)
    tanh: float32[4, 8] = aten.tanh.default(exp)
    mm: float32[4, 4] = aten.mm.default(tanh, weight)
    return (mm,), ()
""".replace("    x: float32[4, 8],\n", "    x: float32[4, 8],\n    weight: float32[8, 4],\n")


def test_as_text_pointwise_operations_cost_less_where_they_are_fused() -> None:
    before, after = joint_of(FUSED), fuse_costs(joint_of(FUSED), CPU)
    cheaper = [
        node.name
        for old, node in zip(before.computed(), after.computed(), strict=True)
        if node.meta[Mark.SECONDS] < old.meta[Mark.SECONDS]
    ]
    assert cheaper == ["exp", "tanh"]


def test_as_text_other_operations_cost_what_they_did() -> None:
    alone = FUSED.replace("aten.exp.default(x)", "aten.mm.default(x, square)").replace(
        "aten.tanh.default(exp)", "aten.mm.default(exp, square)"
    )
    alone = alone.replace("    weight:", "    square: float32[8, 8],\n    weight:")
    before, after = joint_of(alone), fuse_costs(joint_of(alone), CPU)
    assert [n.meta[Mark.SECONDS] for n in before.computed()] == [n.meta[Mark.SECONDS] for n in after.computed()]
