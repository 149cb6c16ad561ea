from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.analysis.cost import tensor_bytes
from roundpipe_fx.analysis.cost.roofline import DEVICES
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    input_nodes,
    is_view,
    module_path,
    storages,
    tensor_values,
)
from roundpipe_fx.ir.segment import Segment
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.boolean_indexing import expand_boolean_indexing
from roundpipe_fx.passes.segments import cut_segments
from roundpipe_fx.torch_private import module_path_text
from tests.capturing import capture_joint
from tests.golden_models import DropoutMLP, EncoderDecoder, MixtureOfExperts, TiedTransformer, UNet
from tests.graph_text import after


def _segments(model: nn.Module, *inputs: torch.Tensor) -> tuple[JointGraph, list[Segment]]:
    return cut_segments(annotate(expand_boolean_indexing(capture_joint(model, *inputs)), DEVICES["cpu"]))


def _starts(joint: JointGraph) -> list[str]:
    found: dict[int, str] = {}
    for node in joint.in_phase(Phase.FORWARD):
        found.setdefault(node.meta[Mark.SEGMENT], module_path(node, module_path_text))
    return list(found.values())


TOKENS = torch.randint(16, (8, 32))


def test_transformer_is_cut_at_the_residual_stream_twice_a_block() -> None:
    joint, segments = _segments(TiedTransformer(width=32, depth=6), TOKENS, TOKENS)
    starts = _starts(joint)
    for block in range(1, 6):
        assert f"blocks.{block}.norm1" in starts and f"blocks.{block}.norm2" in starts
    inner = [segment.fingerprint for segment in segments[2:-3]]
    assert len(set(inner)) == 2 and inner[::2] == [inner[0]] * len(inner[::2])


def test_chain_is_cut_between_layers_and_alike_layers_are_recognized() -> None:
    _, segments = _segments(DropoutMLP(depth=6), torch.randn(4, 8))
    assert len(segments) == 6
    assert len({segment.fingerprint for segment in segments[1:-1]}) == 1


@pytest.mark.long
def test_experts_stay_in_their_layer() -> None:
    joint, segments = _segments(MixtureOfExperts(depth=5, experts=4), torch.randn(16, 8))
    starts = _starts(joint)
    assert [start for start in starts if start.endswith("router")] == [f"layers.{i}.router" for i in range(5)]
    assert len({segment.fingerprint for segment in segments[3:-1]}) == 1


def test_inside_of_a_unet_is_cut() -> None:
    joint, _ = _segments(UNet(channels=4, depth=3), torch.randn(2, 3, 32, 32))
    assert len(_starts(joint)) >= 6


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (DropoutMLP(), (torch.randn(4, 8),)),
        (TiedTransformer(), (TOKENS, TOKENS)),
        (MixtureOfExperts(), (torch.randn(6, 8),)),
        (UNet(), (torch.randn(2, 3, 8, 8),)),
        (EncoderDecoder(), (torch.randn(2, 3, 8), torch.randn(2, 4, 8))),
    ],
    ids=["mlp", "tied", "experts", "unet", "encoder_decoder"],
)
@pytest.mark.quick_every(2)
def test_invariants(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    joint, segments = _segments(model, *inputs)
    forward, backward = joint.in_phase(Phase.FORWARD), joint.in_phase(Phase.BACKWARD)
    order = [node.meta[Mark.SEGMENT] for node in forward]
    assert order == sorted(order) and set(order) == set(range(len(segments)))
    for node in forward:  # no tuple crosses a cut
        if not tensor_values(node) or isinstance(node.meta["val"], (tuple, list)):
            assert {u.meta[Mark.SEGMENT] for u in node.users if u in forward} <= {node.meta[Mark.SEGMENT]}
    members = set(backward)
    for node in backward:  # the backward visits segments last to first
        for source in input_nodes(node):
            if source in members:
                assert node.meta[Mark.SEGMENT] <= source.meta[Mark.SEGMENT]
    # Most of the backward belongs where its forward is, not where data flow alone would leave it.
    assert {node.meta[Mark.SEGMENT] for node in backward} == set(range(len(segments)))
    for segment in segments:
        assert segment.entry_bytes == _live_across(forward, segment.index)


def _live_across(forward: list, segment: int) -> int:
    """Bytes of computed values made before ``segment`` and read in it or after: counted by definition."""
    before = [node for node in forward if node.meta[Mark.SEGMENT] < segment]
    after = [node for node in forward if node.meta[Mark.SEGMENT] >= segment]
    made = {storage for node in before if not is_view(node) for storage in storages(node)}
    read = {storage for node in after for source in input_nodes(node) for storage in storages(source)}
    values = [v for node in before for v in tensor_values(node) if v.untyped_storage()._cdata in made & read]
    return tensor_bytes(values)


def test_as_text_a_segment_begins_where_it_must() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # forward
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t: float32[8, 4] = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    t_1: float32[8, 8] = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4] = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
"""
    made = after(cut_segments, before, [2], name="segments")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # forward, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # forward, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward, segment 1
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t: float32[8, 4].strides(1, 8) = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    t_1: float32[8, 8].strides(1, 8) = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4].strides(1, 8) = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
""",
    )


def test_as_text_segments_begin_where_it_is_known_alone() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # forward
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t: float32[8, 4] = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    t_1: float32[8, 8] = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4] = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
"""
    made = after(cut_segments, before, (), False, [2], name="segments")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # forward, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # forward, segment 1
    mm_1: float32[4, 8] = aten.mm.default(tanh, w)
    exp: float32[4, 8] = aten.exp.default(mm_1)
    # backward, segment 1
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, exp)
    t: float32[8, 4].strides(1, 8) = aten.t.default(tanh)
    mm_2: float32[8, 8] = aten.mm.default(t, mul)
    t_1: float32[8, 8].strides(1, 8) = aten.t.default(w)
    mm_3: float32[4, 8] = aten.mm.default(mul, t_1)
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 4].strides(1, 8) = aten.t.default(x)
    mm_4: float32[8, 8] = aten.mm.default(t_2, tanh_backward)
    return (exp,), (None, mm_2, mm_4)
""",
    )


def test_compiled_segments_begin_between_kernels() -> None:
    """A log-softmax stays with the loss that reads it, where a compiler fuses both."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 64)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(x), labels)

    batch = torch.randn(16, 8), torch.zeros(16, dtype=torch.long)
    for fused, together in ((False, False), (True, True)):
        joint, _ = cut_segments(annotate(capture_joint(Head(), *batch), DEVICES["cpu"]), fused=fused)
        segments = {str(node.target): node.meta[Mark.SEGMENT] for node in joint.in_phase(Phase.FORWARD)}
        of_softmax, of_loss = segments["aten._log_softmax.default"], segments["aten.nll_loss_forward.default"]
        assert (of_softmax == of_loss) is together


class _TimesIntegers(torch.autograd.Function):
    """A product with a frozen weight that is eight bits a number, and is made of them in each direction anew."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(integers)
        return x @ integers.to(x.dtype).mul(0.01)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] @ ctx.saved_tensors[0].to(gradients[0].dtype).mul(0.01).T, None


class _Frozen(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for layer in range(depth):
            self.register_buffer(
                f"integers_{layer}",
                torch.randint(-9, 9, (width, width), dtype=torch.int8, generator=generator),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for integers in self.buffers():
            x = _TimesIntegers.apply(x, integers).tanh()
        return x


def test_what_only_reads_inputs_is_in_the_segment_of_its_first_reader() -> None:
    joint, _ = _segments(_Frozen(depth=6, width=64), torch.randn(8, 64, requires_grad=True))
    made = [node for node in joint.in_phase(Phase.BACKWARD) if node.target is torch.ops.aten._to_copy.default]
    # From the number to its multiple, which the product's view reads.
    chains = [[node, *node.users, *next(iter(node.users)).users] for node in made]
    found = [[node.meta[Mark.SEGMENT] for node in chain] for chain in chains]
    products = [next(iter(chain[-1].users)).meta[Mark.SEGMENT] for chain in chains]
    assert len(set(products)) == 5
    assert found == [[segment] * 3 for segment in products]


@pytest.mark.parametrize("budget", [None, 0.0])
def test_numbers_of_one_frozen_weight_exist_at_a_time(budget: float | None) -> None:
    depth, width = 8, 256
    model = roundpipe_fx.compile(_Frozen(depth, width), memory_budget=budget, stage_compiler="eager")
    x = torch.randn(4, width, requires_grad=True)
    (expected,) = torch.autograd.grad(_Frozen(depth, width)(x).square().sum(), [x])
    for _ in range(2):
        x.grad = None
        with roundpipe_fx.measure_peak() as peak:
            model(x).square().sum().backward()
    weight = width * width * 4
    assert x.grad is not None and torch.equal(x.grad, expected)
    assert weight < peak.bytes < 3 * weight
    assert peak.bytes <= model.plan.peak_bytes < 3 * weight


class _Swish(torch.autograd.Function):
    """An activation that computes what its gradient needs of the input once more, instead of saving it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return gradients[0] * gate * (1 + x * (1 - gate))


class _Activated(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = _Swish.apply(layer(x))
        return x.square().sum()


@pytest.mark.parametrize(("budget", "most"), [(None, 18.5), (0.5, 14), (0.0, 8)])
def test_what_functions_compute_once_more_exists_for_one_layer_at_a_time(budget: float | None, most: float) -> None:
    """Two values a layer are saved, or one, or none; a few more exist at a time."""
    depth, width, rows = 8, 16, 1024
    original, x = _Activated(depth, width), torch.randn(rows, width)
    expected = torch.autograd.grad(original(x), [*original.parameters()])
    model = roundpipe_fx.compile(original, memory_budget=budget, stage_compiler="eager")
    for _ in range(2):
        model.zero_grad()
        with roundpipe_fx.measure_peak() as peak:
            model(x).backward()
    for parameter, gradient in zip(original.parameters(), expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
    assert peak.bytes <= model.plan.peak_bytes
    assert peak.bytes / (rows * width * 4) < most
