from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import roundpipe_fx
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.passes.channels_last import put_channels_last
from tests.capturing import capture_joint, example_inputs
from tests.graph_text import after
from tests.long import long_but

aten = torch.ops.aten


def _on_cpu(joint: JointGraph) -> JointGraph:
    return put_channels_last(joint, True, {})


def test_as_text_what_enters_a_convolution_is_converted_once_and_what_leaves_is_converted_back() -> None:
    """The backward reads the forward's copies; the gradient that arrives has a copy of its own."""
    before = """\
def joint(
    x: float32[2, 3, 4, 4],
    w: float32[5, 3, 3, 3],
    tangents_1: float32[2, 5, 2, 2],
):
    # captured
    convolution: float32[2, 5, 2, 2] = aten.convolution.default(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    relu: float32[2, 5, 2, 2] = aten.relu.default(convolution)
    threshold_backward: float32[2, 5, 2, 2] = aten.threshold_backward.default(tangents_1, relu, 0)
    convolution_backward: (float32[2, 3, 4, 4], float32[5, 3, 3, 3], NoneType) = aten.convolution_backward.default(threshold_backward, x, w, [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    getitem: float32[2, 3, 4, 4] = convolution_backward[0]
    getitem_1: float32[5, 3, 3, 3] = convolution_backward[1]
    return (relu,), (getitem, getitem_1)
"""
    made = after(_on_cpu, before, name="channels_last")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[2, 3, 4, 4],
    w: float32[5, 3, 3, 3],
    tangents_1: float32[2, 5, 2, 2],
):
    # captured
    clone_default: float32[2, 3, 4, 4].strides(48, 1, 12, 3) = aten.clone.default(x, memory_format=torch.channels_last)
    clone_default_1: float32[5, 3, 3, 3].strides(27, 1, 9, 3) = aten.clone.default(w, memory_format=torch.channels_last)
    convolution: float32[2, 5, 2, 2].strides(20, 1, 10, 5) = aten.convolution.default(clone_default, clone_default_1, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    relu: float32[2, 5, 2, 2].strides(20, 1, 10, 5) = aten.relu.default(convolution)
    permute_default: float32[2, 5, 2, 2].strides(20, 1, 10, 5) = aten.permute.default(relu, [0, 1, 2, 3])
    clone_default_3: float32[2, 5, 2, 2] = aten.clone.default(permute_default, memory_format=torch.contiguous_format)
    permute_default_1: float32[2, 5, 2, 2] = aten.permute.default(clone_default_3, [0, 1, 2, 3])
    clone_default_2: float32[2, 5, 2, 2].strides(20, 1, 10, 5) = aten.clone.default(tangents_1, memory_format=torch.channels_last)
    threshold_backward: float32[2, 5, 2, 2].strides(20, 1, 10, 5) = aten.threshold_backward.default(clone_default_2, relu, 0)
    convolution_backward: (float32[2, 3, 4, 4], float32[5, 3, 3, 3], NoneType) = aten.convolution_backward.default(threshold_backward, clone_default, clone_default_1, [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    getitem: float32[2, 3, 4, 4].strides(48, 1, 12, 3) = convolution_backward[0]
    permute_default_2: float32[2, 3, 4, 4].strides(48, 1, 12, 3) = aten.permute.default(getitem, [0, 1, 2, 3])
    clone_default_4: float32[2, 3, 4, 4] = aten.clone.default(permute_default_2, memory_format=torch.contiguous_format)
    permute_default_3: float32[2, 3, 4, 4] = aten.permute.default(clone_default_4, [0, 1, 2, 3])
    getitem_1: float32[5, 3, 3, 3].strides(27, 1, 9, 3) = convolution_backward[1]
    permute_default_4: float32[5, 3, 3, 3].strides(27, 1, 9, 3) = aten.permute.default(getitem_1, [0, 1, 2, 3])
    clone_default_5: float32[5, 3, 3, 3] = aten.clone.default(permute_default_4, memory_format=torch.contiguous_format)
    permute_default_5: float32[5, 3, 3, 3] = aten.permute.default(clone_default_5, [0, 1, 2, 3])
    return (permute_default_1,), (permute_default_3, permute_default_5)
""",
    )


def test_as_text_images_are_joined_in_the_order_of_convolutions() -> None:
    """An operand of a joined image is converted, and not the whole; images of one pixel have no order."""
    before = """\
def joint(
    x: float32[2, 3, 4, 4],
    y: float32[2, 2, 4, 4],
    p: float32[2, 2, 1, 1],
    w: float32[3, 3, 1, 1],
    v: float32[3, 5, 1, 1],
):
    # captured
    convolution: float32[2, 3, 4, 4] = aten.convolution.default(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    cat: float32[2, 5, 4, 4] = aten.cat.default([y, convolution], 1)
    convolution_1: float32[2, 3, 4, 4] = aten.convolution.default(cat, v, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    cat_1: float32[2, 4, 1, 1] = aten.cat.default([p, p], 1)
    return (convolution_1, cat_1), ()
"""
    made = after(_on_cpu, before, name="channels_last")
    cats = [line.strip() for line in made.splitlines() if " aten.cat." in line]
    assert cats == [
        "cat: float32[2, 5, 4, 4].strides(80, 1, 20, 5) = aten.cat.default([clone_default_1, convolution], 1)",
        "cat_1: float32[2, 4, 1, 1] = aten.cat.default([p, p], 1)",
    ]
    assert "aten.clone.default(cat" not in made and "aten.clone.default(y, memory_format=torch.channels_last)" in made


def test_as_text_without_convolutions_nothing_changes() -> None:
    before = """\
def joint(
    x: float32[2, 3, 4, 4],
    tangents_1: float32[2, 3, 4, 4],
):
    # captured
    relu: float32[2, 3, 4, 4] = aten.relu.default(x)
    threshold_backward: float32[2, 3, 4, 4] = aten.threshold_backward.default(tangents_1, relu, 0)
    return (relu,), (threshold_backward,)
"""
    assert after(_on_cpu, before, name="channels_last") == before


class _Block(nn.Module):
    """Convolves, and applies a function to the images."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], convolution: type[nn.Module], **options: Any):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = convolution(8, 8, 2, stride=2, **options)
        self.function = function

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        images = self.second(F.silu(self.norm(self.first(x))))
        return self.function(images).square().mean(), images


def _attention(x: torch.Tensor) -> torch.Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(tokens, tokens, tokens)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flattened": lambda x: x.view(x.shape[0], -1),  # no view of images whose channels lie innermost
    "attention": _attention,
    "pooled": lambda x: F.max_pool2d(x, 2),
    "interpolated and joined": lambda x: torch.cat([F.interpolate(x, scale_factor=2), x.repeat(1, 1, 2, 2)], 1),
    "group norm": lambda x: F.group_norm(x, 2),
    "pixels shuffled": lambda x: F.pixel_shuffle(x, 2),
    "strided": lambda x: x.as_strided((2, 4, 3), (64, 5, 1)),
    "softmax of channels": lambda x: x.softmax(1).cumsum(2),
    "one channel of each": lambda x: x[:, 1].expand(3, *x[:, 1].shape),
}
CONVOLUTIONS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "plain": (nn.Conv2d, {}),
    "depthwise": (nn.Conv2d, {"groups": 8}),
    "in groups": (nn.Conv2d, {"groups": 2, "bias": False}),
    "transposed": (nn.ConvTranspose2d, {}),
}
BLOCKS = [
    *((name, "plain") for name in FUNCTIONS),
    *(("group norm", name) for name in CONVOLUTIONS if name != "plain"),
]


def _block(function: str, convolution: str) -> _Block:
    kind, options = CONVOLUTIONS[convolution]
    torch.manual_seed(0)
    return _Block(FUNCTIONS[function], kind, **options)


@pytest.mark.parametrize(("function", "convolution"), BLOCKS)
def test_values_have_the_recorded_strides_and_results_those_of_before(function: str, convolution: str) -> None:
    joint = capture_joint(_block(function, convolution).double(), torch.randn(2, 3, 8, 8, dtype=torch.float64))
    inputs = example_inputs(joint)
    expected, _ = _run(joint, inputs)
    joint = _on_cpu(joint)
    results, strides = _run(joint, inputs)
    for result, before in zip(results, expected, strict=True):
        if isinstance(before, torch.Tensor):
            assert _order(result, result.stride()) == _order(before, before.stride())
        torch.testing.assert_close(result, before)
    recorded = {node: node.meta["val"] for node in strides}
    assert {
        str(node): (strides[node], value.stride())
        for node, value in recorded.items()
        if _order(value, strides[node]) != _order(value, value.stride())
    } == {}
    (norm,) = joint.graph.find_nodes(op="call_function", target=aten.silu.default)
    assert strides[norm][1] == 1, "what lies between convolutions has channels innermost"


def _run(joint: JointGraph, inputs: list[Any]) -> tuple[list[Any], dict[fx.Node, tuple[int, ...]]]:
    """Results of a graph, and strides of the values that it computes."""
    strides = {}

    class Watching(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            result = super().run_node(node)
            if isinstance(result, torch.Tensor) and node.op == "call_function":
                strides[node] = result.stride()
            return result

    with torch.no_grad():
        results = Watching(joint.module).run(*copy.deepcopy(inputs))
    return list(results), strides


def _order(value: torch.Tensor, strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Strides of the dimensions with several elements."""
    return [(dim, stride) for dim, stride in enumerate(strides) if value.shape[dim] > 1]


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("channels", [8, 128])
def test_on_gpus_sizes_of_convolutions_decide(on_cpu: bool, channels: int) -> None:
    model = nn.Sequential(nn.Conv2d(channels, channels, 3), nn.ReLU())
    joint = capture_joint(model, torch.randn(2, channels, 8, 8))
    names = [node.name for node in joint.computed()]
    joint = put_channels_last(joint, on_cpu, {})
    assert (names != [node.name for node in joint.computed()]) == (on_cpu or channels == 128)


def test_inductors_setting_leaves_all_as_captured() -> None:
    joint = capture_joint(nn.Conv2d(3, 8, 3), torch.randn(2, 3, 8, 8))
    names = [node.name for node in joint.computed()]
    joint = put_channels_last(joint, True, {"layout_optimization": False})
    assert names == [node.name for node in joint.computed()]


OPTIONS: dict[str, dict[str, Any]] = {
    "no budget": {},
    "least": {"memory_budget": 0.0},
    "recomputed": {"stages": 3, "recompute": "full"},
}


@pytest.mark.parametrize(
    ("function", "convolution"), [("group norm", "transposed"), ("interpolated and joined", "plain")]
)
@pytest.mark.parametrize("options", long_but(OPTIONS, quick={"recomputed"}))
def test_trains_as_eagerly_in_compiled_stages(function: str, convolution: str, options: str) -> None:
    """Results and gradients have the strides of the eager model's."""
    model, images = _block(function, convolution), torch.randn(3, 3, 8, 8)
    precise = copy.deepcopy(model).double()
    compiled = roundpipe_fx.compile(model, stage_compiler="inductor", fullgraph=True, **OPTIONS[options])
    loss, result = compiled(images)
    loss.backward()
    expected, eager_result = precise(images.double())
    expected.backward()
    assert result.stride() == eager_result.stride()
    torch.testing.assert_close(result.double(), eager_result, rtol=1e-4, atol=1e-5)
    for (name, parameter), its in zip(model.named_parameters(), precise.parameters(), strict=True):
        assert parameter.grad is not None and its.grad is not None
        assert parameter.grad.stride() == its.grad.stride(), name
        torch.testing.assert_close(parameter.grad.double(), its.grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.long
def test_images_are_handed_over_with_channels_innermost() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())))
    compiled = roundpipe_fx.compile(model, stage_compiler="inductor", stages=2)
    plan = compiled.trace(torch.randn(2, 8, 16, 16))
    images = [
        node.meta["val"]
        for module in plan.modules
        for node in module.inputs
        if node.op != "placeholder" and isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].dim() == 4
    ]
    assert images
    assert all(value.stride(1) == 1 for value in images)
