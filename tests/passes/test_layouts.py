from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import fx, nn

import roundpipe_fx
from roundpipe_fx.passes.dropout import expand_dropout
from roundpipe_fx.passes.layouts import restore_layouts
from tests.capturing import capture_joint, example_inputs
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step, train_step
from tests.graph_text import after

aten = torch.ops.aten


class _Lying(nn.Module):
    """The gradient that arrives at ``function`` lies otherwise than what ``function`` was given."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(16, 3)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x)).transpose(1, 2)).square().mean()


FUNCTIONS = {
    "softplus": nn.functional.softplus,
    "hardswish": nn.functional.hardswish,
    "hardsigmoid": nn.functional.hardsigmoid,
    "relu6": nn.functional.relu6,
    "xlogy": lambda x: torch.xlogy(x, 2 + x.sigmoid()),
    "log_softmax": lambda x: x.log_softmax(-1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("options", [{"recompute": "none"}, {"memory_budget": 0.0}], ids=str)
def test_trains_as_eagerly(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = _Lying(FUNCTIONS[name])
    batch = {"x": torch.randn(2, 16, 8)}
    step, _ = compiled_step(model, batch, stages=1, **options)
    eagerly = train_step(model, model, batch)
    assert torch.equal(step.loss, eagerly.loss)
    for name, gradient in step.gradients.items():
        torch.testing.assert_close(gradient, eagerly.gradients[name], rtol=1e-6, atol=1e-8)


def test_copy_is_made_where_the_kernel_orders_dimensions_otherwise() -> None:
    joint = capture_joint(_Lying(nn.functional.softplus), torch.randn(2, 16, 8))
    before = [str(node.target) for node in joint.computed()]
    joint = restore_layouts(joint)
    added = [str(node.target) for node in joint.computed()]
    assert added.count("aten.clone.default") == before.count("aten.clone.default") + 1
    (backward,) = joint.graph.find_nodes(op="call_function", target=aten.softplus_backward.default)
    value, noted = backward.meta["val"], next(iter(backward.users))
    assert value.stride() == (96, 1, 16)  # as the real kernel lays it out
    assert noted.target is aten.permute.default


def test_nothing_is_copied_where_all_lies_alike() -> None:
    joint = capture_joint(_Lying(torch.tanh), torch.randn(2, 16, 8))
    before = len(list(joint.computed()))
    assert len(list(restore_layouts(joint).computed())) == before


class _Turned(nn.Module):
    """Convolves along rows that lie as columns, as SqueezeBERT does."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.convolve, self.norm, self.drop = nn.Conv1d(32, 32, 1, groups=4), nn.LayerNorm(32), nn.Dropout(0.1)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.convolve(x.permute(0, 2, 1))
        y = self.drop(y if self.activation is None else self.activation(y))
        return (self.norm((x.permute(0, 2, 1) + y).permute(0, 2, 1)) * x).sum()


@pytest.mark.parametrize("activation", [None, nn.functional.hardswish, torch.tanh])
@pytest.mark.parametrize("options", [{"recompute": "none"}, {"memory_budget": 0.0}], ids=str)
def test_what_lies_otherwise_and_fails_nowhere_lies_as_eagerly(
    activation: Callable[[torch.Tensor], torch.Tensor] | None, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, batch = _Turned(activation), {"x": torch.randn(2, 16, 32)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with several, sums of this size are cut up so that they do not depend on it
    try:
        step, _ = compiled_step(model, batch, stages=1, **options)
        assert_bitwise(step, aot_eager_step(model, batch))
    finally:
        torch.set_num_threads(threads)


def test_how_it_lies_is_noted() -> None:
    joint = expand_dropout(capture_joint(_Turned(), torch.randn(4, 50, 32)))
    before = len(list(joint.computed()))
    (convolved,) = joint.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    gradient = convolved.args[0]
    noted = gradient.meta["val"].stride()
    joint = restore_layouts(joint)
    assert len(list(joint.computed())) == before, "nothing is copied"
    assert gradient.meta["val"].stride() != noted
    inputs = example_inputs(joint)
    seen = {}

    class Watching(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            result = super().run_node(node)
            if isinstance(result, torch.Tensor) and node.op == "call_function":
                seen[node] = result.stride()
            return result

    Watching(joint.module).run(*inputs)
    assert seen[gradient] == gradient.meta["val"].stride()
    assert {node: strides for node, strides in seen.items() if strides != node.meta["val"].stride()} == {}


def test_as_text_values_that_lie_as_noted_are_left() -> None:
    before = """\
def joint(
    x: float32[4, 8],
):
    # captured
    t: float32[8, 4] = aten.t.default(x)
    exp: float32[8, 4] = aten.exp.default(t)
    return (exp,), ()
"""
    made = after(restore_layouts, before, name="layouts")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
):
    # captured
    t: float32[8, 4].strides(1, 8) = aten.t.default(x)
    exp: float32[8, 4].strides(1, 8) = aten.exp.default(t)
    return (exp,), ()
""",
    )


def test_as_text_what_would_lie_otherwise_is_copied() -> None:
    """The text says that the result is contiguous; real ones have the strides of the operand."""
    before = """\
def joint(
    x: float32[8, 4],
):
    # captured
    t: float32[4, 8] = aten.t.default(x)
    exp: float32[4, 8].strides(8, 1) = aten.exp.default(t)
    view: float32[32] = aten.view.default(exp, [32])
    return (view,), ()
"""
    made = after(restore_layouts, before, name="layouts")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[8, 4],
):
    # captured
    t: float32[4, 8].strides(1, 4) = aten.t.default(x)
    exp: float32[4, 8].strides(1, 4) = aten.exp.default(t)
    permute_default: float32[4, 8].strides(1, 4) = aten.permute.default(exp, [0, 1])
    clone_default: float32[4, 8] = aten.clone.default(permute_default, memory_format=torch.contiguous_format)
    permute_default_1: float32[4, 8] = aten.permute.default(clone_default, [0, 1])
    view: float32[32] = aten.view.default(permute_default_1, [32])
    return (view,), ()
""",
    )


class _NormalizedAttention(nn.Module):
    """As in the U-Nets of diffusion models: a sequence becomes an image, whose channels lie innermost."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.GroupNorm(2, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.layer(x).transpose(1, 2).reshape(x.shape[0], 8, 4, 4)
        return self.conv(self.norm(image + 1)).square().mean()


@pytest.mark.parametrize("samples", [1, 2])
def test_a_single_sample_with_innermost_channels_is_normalized_as_eagerly(samples: int) -> None:
    """``aot_eager`` of torch 2.13 fails on one sample."""
    torch.manual_seed(0)
    model, batch = _NormalizedAttention(), {"x": torch.randn(samples, 16, 8)}
    for options in ({"recompute": "none"}, {"memory_budget": 0.0}):
        step, _ = compiled_step(model, batch, stages=1, **options)
        eagerly = train_step(model, model, batch)
        torch.testing.assert_close(step.loss, eagerly.loss)
        for name, gradient in step.gradients.items():
            torch.testing.assert_close(gradient, eagerly.gradients[name], rtol=1e-5, atol=1e-7)
    joint = restore_layouts(capture_joint(model, batch["x"]))
    copied = [str(node.target) for node in joint.computed()].count("aten.clone.default")
    assert (copied > 0) == (samples == 1)


class _Rolled(nn.Module):
    """What is returned lies otherwise than is noted, and a size follows it in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.rows = nn.Linear(8, 48), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (x * 1.25).index_put((torch.tensor([0, 1, 0]),), x[:3], accumulate=True)
        images = self.images(x.flatten(1)).view(-1, 4, 2, 6).contiguous(memory_format=torch.channels_last)
        return (images * 1.5).roll(1, 1), self.rows(rows)


class _Normalized(nn.Module):
    """Batch normalization of what lies transposed; a view of it is returned, too."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(2, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        real = torch.fft.fft(torch.fft.fft(x, dim=-1, norm="ortho"), dim=1, norm="ortho").real
        normalized = self.norm(real + self.rows(real))
        return normalized, normalized.transpose(1, 2)[:, 1:]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("make", [_Rolled, _Normalized])
def test_outputs_lie_as_eagerly(make: Callable[[], nn.Module], dynamic: bool) -> None:
    torch.manual_seed(0)
    own, x = make(), torch.randn(6, 2, 4)
    model = roundpipe_fx.compile(own, dynamic=dynamic)
    results = []
    for run in (own, model):
        own.zero_grad()
        outputs = run(x)
        sum(output.square().mean() * (1 + place) for place, output in enumerate(outputs)).backward()
        results.append((outputs, [parameter.grad for parameter in own.parameters()]))
    (expected, gradients), (found, own_gradients) = results
    assert [output.stride() for output in found] == [output.stride() for output in expected]
    assert all(map(torch.equal, found, expected))
    for gradient, own_gradient in zip(gradients, own_gradients, strict=True):
        torch.testing.assert_close(own_gradient, gradient, rtol=1e-5, atol=1e-7)
