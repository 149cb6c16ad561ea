from __future__ import annotations

import itertools

import expecttest
import torch
from torch import fx, nn

from roundpipe_fx.analysis.cost.roofline import DEVICES
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, input_nodes, is_view, storages, viewed
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.apply_remat_schedule import apply_remat_schedule
from roundpipe_fx.passes.early_recompute import early_recompute
from roundpipe_fx.passes.segments import cut_segments
from roundpipe_fx.passes.stages import cut_stages
from roundpipe_fx.remat.save_policy import recompute_unsaved, save_stage_inputs
from tests.capturing import capture_joint
from tests.graph_text import after

CPU = DEVICES["cpu"]


def _joint(model: nn.Module, *inputs: torch.Tensor) -> JointGraph:
    joint, segments = cut_segments(annotate(capture_joint(model, *inputs), CPU))
    joint, _ = cut_stages(joint, segments, 1, lambda size: 0.0)
    return apply_remat_schedule(joint, recompute_unsaved(joint, save_stage_inputs(joint)), CPU)


def _handed_over(joint: JointGraph) -> int:
    """Bytes that the backward reads of what the recomputation made."""
    backward = set(joint.in_phase(Phase.BACKWARD))
    made: dict[int, int] = {}
    for node in joint.in_phase(Phase.RECOMPUTE):
        for storage in storages(node):
            if not is_view(node) and not isinstance(node.meta["val"], (tuple, list)):
                made.setdefault(storage, node.meta["val"].untyped_storage().nbytes())
    read = {storage for node in backward for source in input_nodes(node) for storage in storages(source)}
    return sum(size for storage, size in made.items() if storage in read)


class Powers(nn.Module):
    """Derivatives that need no gradient: 3 x^2 beside a kept x, and a mean that shrinks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        return (y.pow(3) / y.exp().sum(dim=1, keepdim=True)).sum()


def test_the_cut_is_the_least_of_all() -> None:
    found = early_recompute(_joint(Powers(), torch.randn(8, 16)))
    best = _handed_over(found)
    base = _joint(Powers(), torch.randn(8, 16))
    tangents: set[fx.Node] = set(base.tangents)
    free = []
    for node in base.in_phase(Phase.BACKWARD):
        if any(source in tangents for source in input_nodes(node)):
            tangents.add(node)
        else:
            free.append(node)
    assert 1 <= len(free) <= 12
    least = None
    for choice in itertools.product([Phase.RECOMPUTE, Phase.BACKWARD], repeat=len(free)):
        for node, phase in zip(free, choice, strict=True):
            node.meta[Mark.PHASE] = phase
        if any(
            source in free and source.meta[Mark.PHASE] is Phase.BACKWARD and node.meta[Mark.PHASE] is Phase.RECOMPUTE
            for node in free
            for source in input_nodes(node)
        ):
            continue
        handed = _handed_over(base)
        least = handed if least is None else min(least, handed)
    assert best == least


def test_what_shrinks_goes_ahead() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).sum(dim=1).pow(3).sum()

    joint = early_recompute(_joint(Mean(), torch.randn(8, 16)))
    early = [node for node in joint.in_phase(Phase.RECOMPUTE) if Mark.ORIGIN not in node.meta]
    assert early and all(node.meta[Mark.BYTES] <= 32 for node in early)


class Windows(nn.Module):
    """Windows that overlap: their gradient is gathered by indices, views of numbers that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).as_strided((4, 7, 2), (8, 1, 1)).square().sum()


def test_view_read_by_another_stage_comes_after_what_it_views() -> None:
    joint = _joint(Windows(), torch.randn(4, 8))
    backward = set(joint.in_phase(Phase.BACKWARD))
    views = [
        node
        for node in backward
        if is_view(node) and viewed(node) in backward and not is_view(viewed(node)) and not _waits(joint, node)
    ]
    assert views
    for node in joint.computed():  # its readers are another stage's
        if any(view in input_nodes(node) for view in views):
            node.meta[Mark.STAGE] = node.meta[Mark.STAGE] - 1
    early_recompute(joint)
    for node in joint.in_phase(Phase.RECOMPUTE):
        for source in input_nodes(node):
            beside = source.meta.get(Mark.STAGE) == node.meta[Mark.STAGE]
            assert not (beside and source.meta.get(Mark.PHASE) is Phase.BACKWARD), (node, source)


def _waits(joint: JointGraph, node: fx.Node) -> bool:
    return node in joint.tangents or any(_waits(joint, source) for source in input_nodes(node))


def test_as_text_a_reduction_of_what_is_recomputed_runs_early() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    exp: float32[4, 8] = aten.exp.default(x)
    tanh: float32[4, 8] = aten.tanh.default(exp)
    # recompute, stage 0, segment 0
    exp_1: float32[4, 8] = aten.exp.default(x)  # repeats: exp
    # backward, stage 0, segment 0
    amax: float32[4, 1] = aten.amax.default(exp_1, [1], True)
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, amax)
    return (tanh,), (mul,)
"""
    made = after(early_recompute, before, name="early_recompute")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    exp: float32[4, 8] = aten.exp.default(x)
    tanh: float32[4, 8] = aten.tanh.default(exp)
    # recompute, stage 0, segment 0
    exp_1: float32[4, 8] = aten.exp.default(x)  # repeats: exp
    amax: float32[4, 1] = aten.amax.default(exp_1, [1], True)
    # backward, stage 0, segment 0
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, amax)
    return (tanh,), (mul,)
""",
    )


def test_as_text_what_waits_stays() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    exp: float32[4, 8] = aten.exp.default(x)
    tanh: float32[4, 8] = aten.tanh.default(exp)
    # backward, stage 0, segment 0
    square: float32[4, 8] = aten.mul.Tensor(tangents_1, tanh)
    mul_1: float32[4, 8] = aten.mul.Tensor(tangents_1, square)
    return (tanh,), (mul_1,)
"""
    made = after(early_recompute, before, name="early_recompute")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    exp: float32[4, 8] = aten.exp.default(x)
    tanh: float32[4, 8] = aten.tanh.default(exp)
    # backward, stage 0, segment 0
    square: float32[4, 8] = aten.mul.Tensor(tangents_1, tanh)
    mul_1: float32[4, 8] = aten.mul.Tensor(tangents_1, square)
    return (tanh,), (mul_1,)
""",
    )
