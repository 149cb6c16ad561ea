from __future__ import annotations

import expecttest
import pytest
import torch
from torch import nn

from roundpipe_fx.analysis.cost.roofline import DEVICES, count_flops, numbers_drawn
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, is_view
from roundpipe_fx.passes.annotate import annotate
from tests.capturing import capture_joint
from tests.graph_text import after

CPU = DEVICES["cpu"]
aten = torch.ops.aten


def _annotated(model: nn.Module, *inputs: torch.Tensor) -> JointGraph:
    return annotate(capture_joint(model, *inputs), CPU)


def test_phases_follow_the_tangents() -> None:
    joint = _annotated(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(3, 4))
    forward, backward = joint.in_phase(Phase.FORWARD), joint.in_phase(Phase.BACKWARD)
    assert [n.target for n in forward if n.meta[Mark.FLOPS]] == [aten.addmm.default] * 2
    assert sum(n.target is aten.mm.default for n in backward) == 3  # x needs no gradient
    assert {*forward, *backward} == set(joint.computed())


def test_bytes_count_each_storage_once() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.weight
            left, right = y.reshape(2, 2, 4).transpose(0, 1).split(1)
            return (left + right).sum()

    joint = _annotated(Views(), torch.randn(4, 4))
    forward = {n.name: n for n in joint.in_phase(Phase.FORWARD)}
    assert forward["mul"].meta[Mark.BYTES] == 64
    views = [n for n in forward.values() if is_view(n)]
    assert len(views) >= 4
    assert all(n.meta[Mark.BYTES] == 0 and n.meta[Mark.SECONDS] == 0 for n in views)
    assert forward["add"].meta[Mark.BYTES] == 32


def test_tuples_are_counted_at_their_maker() -> None:
    joint = _annotated(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1)), torch.randn(6, 4))
    (norm,) = [n for n in joint.computed() if n.target is aten.native_layer_norm.default]
    assert norm.meta[Mark.BYTES] == 6 * 4 * 4 + 2 * 6 * 4
    assert all(item.meta[Mark.BYTES] == 0 and item.meta[Mark.SECONDS] == 0 for item in norm.users)


def test_flops_and_roofline() -> None:
    joint = _annotated(nn.Linear(16, 32, bias=False), torch.randn(8, 16))
    (product,) = [n for n in joint.in_phase(Phase.FORWARD) if n.target is aten.mm.default]
    assert count_flops(product) == product.meta[Mark.FLOPS] == 2 * 8 * 16 * 32
    traffic = 4 * (8 * 16 + 16 * 32 + 8 * 32)
    expected = max(2 * 8 * 16 * 32 / CPU.flops[torch.float32], traffic / CPU.bandwidth) + CPU.overhead
    assert product.meta[Mark.SECONDS] == expected


def test_data_dependent_sizes_count_at_their_bound() -> None:
    joint = _annotated(lambda x: x[x[:, 0] > 0].sum(), torch.randn(6, 4, requires_grad=True))
    (chosen,) = [n for n in joint.in_phase(Phase.FORWARD) if n.target is aten.index.Tensor]
    assert chosen.meta[Mark.BYTES] == 6 * 4 * 4


def test_drawing_takes_longer_than_writing() -> None:
    joint = _annotated(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)), torch.randn(256, 4))
    (dropout,) = (node for node in joint.computed() if node.target is aten.native_dropout.default)
    assert numbers_drawn(dropout.target, dropout.meta["val"]) == 256 * 64
    traffic = 256 * 64 * (4 + 4 + 1)
    assert dropout.meta[Mark.SECONDS] == CPU.seconds(0, traffic, draws=256 * 64)
    assert dropout.meta[Mark.SECONDS] > 2 * CPU.seconds(0, traffic)
    assert DEVICES["H200"].node_seconds(dropout, 0, traffic, torch.float32) == DEVICES["H200"].seconds(0, traffic)


def test_attention_draws_nothing_on_the_cpu() -> None:
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert torch.Tag.nondeterministic_seeded in attention.tags
    assert numbers_drawn(attention, (torch.empty(8), torch.empty(8))) == 0


def test_attention_has_flops_on_the_cpu() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.weight
            return nn.functional.scaled_dot_product_attention(x, x, x)

    joint = _annotated(Attention(), torch.randn(2, 4, 16, 8))
    products = 2 * (2 * 4 * 16 * 16 * 8)  # two matrix products, a multiplication and an addition each
    flops = [node.meta[Mark.FLOPS] for node in joint.computed() if "attention" in node.name]
    assert flops == [2 * products, 5 * products]


def test_as_text_what_only_the_backward_reads_is_its_own() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],
    tangents_1: float32[4, 8],
):
    # captured
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    t: float32[8, 4] = aten.t.default(x)
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(tangents_1, tanh)
    mm_1: float32[8, 8] = aten.mm.default(t, tanh_backward)
    return (tanh,), (None, mm_1)
"""
    made = after(annotate, before, CPU, name="annotate")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],
    tangents_1: float32[4, 8],
):
    # forward
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # backward
    t: float32[8, 4].strides(1, 8) = aten.t.default(x)
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(tangents_1, tanh)
    mm_1: float32[8, 8] = aten.mm.default(t, tanh_backward)
    return (tanh,), (None, mm_1)
""",
    )


def test_as_text_without_gradients_all_is_forward() -> None:
    before = """\
def joint(
    x: float32[4, 8],
):
    # captured
    tanh: float32[4, 8] = aten.tanh.default(x)
    unread: float32[4, 8] = aten.exp.default(x)
    return (tanh,), ()
"""
    made = after(annotate, before, CPU, name="annotate")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
):
    # forward
    tanh: float32[4, 8] = aten.tanh.default(x)
    unread: float32[4, 8] = aten.exp.default(x)
    return (tanh,), ()
""",
    )


def test_backward_of_attention_is_slower_on_gpus() -> None:
    """Published kernels attain less there than in the forward: analysis/cost/device_rates.py."""

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    joint = _annotated(Attention(), torch.randn(2, 4, 16, 8, requires_grad=True))
    forward, backward = [node for node in joint.computed() if "attention" in node.name]
    for name, expected in (("cpu", [1e11, 1e11]), ("RTX 4090", [0.97 * 165.2e12, 0.68 * 165.2e12])):
        roofline, flops = DEVICES[name], 10**15
        seconds = [roofline.node_seconds(node, flops, 0, torch.bfloat16) for node in (forward, backward)]
        assert [flops / (taken - roofline.overhead) for taken in seconds] == pytest.approx(expected)
