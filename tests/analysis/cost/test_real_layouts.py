"""What the graph notes of strides and storages is what kernels really give, whatever their operands lie like."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from roundpipe_fx.ir.joint_graph import JointGraph, tensor_values
from roundpipe_fx.passes.layouts import restore_layouts
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step

aten = torch.ops.aten
CPU = torch.device("cpu")
SIZES = [(2, 6, 4, 4), (2, 6, 1, 1), (2, 1, 4, 4), (1, 6, 4, 4)]


def layouts(value: torch.Tensor) -> Iterator[torch.Tensor]:
    yield value
    yield value.contiguous(memory_format=torch.channels_last)
    yield value.transpose(0, 1).contiguous().transpose(0, 1)
    yield value.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    yield torch.cat([value, value], -1)[..., : value.shape[-1]]
    yield torch.cat([value, value])[:: 2 if len(value) > 1 else 1][: len(value)]
    yield value[..., :1].expand_as(value)


def _channels(value: torch.Tensor) -> torch.Tensor:
    return value[0, :, 0, 0].contiguous()


def _convolution_backward(gradient: torch.Tensor, x: torch.Tensor, groups: int, transposed: bool) -> Any:
    channels = x.shape[1]
    weight = torch.ones(channels, channels // groups, 3, 3)
    settings = [[1, 1], [1, 1], [1, 1], transposed, [0, 0], groups, [True, True, True]]
    return aten.convolution_backward(gradient, x, weight, [channels], *settings)


def _batch_norm(x: torch.Tensor) -> Any:
    return aten._native_batch_norm_legit.no_stats(x, _channels(x), _channels(x), True, 0.1, 1e-5)


def _batch_norm_backward(g: torch.Tensor, x: torch.Tensor) -> Any:
    c = _channels(x)
    return aten.native_batch_norm_backward(g, x, c, None, None, c, c, True, 1e-5, [True, True, True])


def _layer_norm_backward(g: torch.Tensor, x: torch.Tensor) -> Any:
    mean = x.mean(-1, keepdim=True)
    return aten.native_layer_norm_backward(g, x, [x.shape[-1]], mean, mean, None, None, [True, False, False])


OPERATORS: dict[str, Callable[..., Any]] = {
    "batch_norm": _batch_norm,
    "batch_norm_backward": _batch_norm_backward,
    "layer_norm": lambda x: aten.native_layer_norm(x, [x.shape[-1]], None, None, 1e-5),
    "layer_norm_backward": _layer_norm_backward,
    "convolution": lambda x: aten.convolution(
        x, torch.ones(4, x.shape[1], 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    ),
    "convolution_backward": lambda g, x: _convolution_backward(g, x, 1, False),
    "depthwise_backward": lambda g, x: _convolution_backward(g, x, x.shape[1], False),
    "transposed_backward": lambda g, x: _convolution_backward(g, x, 1, True),
    "max_pool": lambda x: aten.max_pool2d_with_indices(x, [1, 1]),
    "avg_pool": lambda x: aten.avg_pool2d(x, [1, 1], [1, 1]),
    "adaptive_pool": lambda x: aten._adaptive_avg_pool2d(x, [2, 2]),
    "adaptive_pool_backward": lambda x: aten._adaptive_avg_pool2d_backward(x.mean((2, 3), keepdim=True), x),
    "upsample": lambda x: aten.upsample_bilinear2d.default(x, [8, 8], False),
    "replication_pad_backward": lambda x: aten.replication_pad2d_backward(
        torch.ones(*x.shape[:2], x.shape[2] + 2, x.shape[3] + 2), x, [1, 1, 1, 1]
    ),
    "softmax": lambda x: aten._softmax(x, 1, False),
    "softmax_backward": lambda g, x: aten._softmax_backward_data(g, x, 1, torch.float32),
    "attention": lambda x: aten._scaled_dot_product_flash_attention_for_cpu(x, x, x),
    "dropout": lambda x: aten.native_dropout(x, 0.5, True),
    "dropout_backward": lambda g, x: aten.native_dropout_backward(g, x > 0, 2.0),
    "log_sigmoid": lambda x: aten.log_sigmoid_forward(x),
    "gelu_backward": lambda g, x: aten.gelu_backward(g, x),
    "softplus_backward": lambda g, x: aten.softplus_backward(g, x, 1, 20),
    "hardswish_backward": lambda g, x: aten.hardswish_backward(g, x),
    "add": lambda g, x: aten.add(g, x),
    "where": lambda g, x: aten.where(g > 0, g, x),
    "xlogy": lambda g, x: aten.xlogy(g, x),
    "mse_loss": lambda g, x: aten.mse_loss(g, x),
    "mse_loss_backward": lambda g, x: aten.mse_loss_backward(g, x, g, 0),
    "binary_cross_entropy_with_logits": lambda g, x: aten.binary_cross_entropy_with_logits(g, x, None, None, 0),
    "cat": lambda g, x: aten.cat([g, x], 1),
    "index": lambda x: aten.index(x, [None, torch.zeros(3, dtype=torch.long)]),
    "roll": lambda x: aten.roll(x, [1], [1]),
    "cumsum": lambda x: aten.cumsum(x, 1),
    "sort": lambda x: aten.sort(x, 1),
    "sum": lambda x: aten.sum(x, [2], True),
    "clone": lambda x: aten.clone(x),
    "masked_fill": lambda g, x: aten.masked_fill(g, x > 0, 0.0),
    "fft": lambda x: aten._fft_r2c(x, [1], 0, True),
}


class _Watching(fx.Interpreter):
    """Notes which values lie otherwise than the graph says."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.wrong: list[str] = []

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node.op == "call_function":
            real = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            for found, noted in zip(real, tensor_values(node), strict=True):
                sizes = found.untyped_storage().nbytes(), noted.untyped_storage().nbytes()
                if found.numel() and (found.stride() != noted.stride() or sizes[0] != sizes[1]):
                    self.wrong.append(f"{node.format_node()}: {found.stride()} is noted as {noted.stride()}, {sizes}")
        return result


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.quick_every(7)
def test_values_lie_as_noted(name: str) -> None:
    run = OPERATORS[name]
    count = run.__code__.co_argcount
    for sizes in SIZES:
        lying = list(layouts(torch.rand(sizes)))
        cases = [(x,) for x in lying] if count == 1 else [*itertools.product(lying[:2], lying), (lying[3], lying[0])]
        for operands in cases:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fakes = [mode.from_tensor(operand) for operand in operands]
                module = make_fx(run)(*fakes)
            output = module.graph.output_node()
            results: list[fx.Node] = []
            fx.node.map_arg(output.args, results.append)
            output.args = (results,)
            restore_layouts(JointGraph(module=module, num_forward_outputs=0), CPU)
            watching = _Watching(module)
            watching.run(*operands)
            assert watching.wrong == []


class _ThroughOnePlace(nn.Module):
    """Batch norm of one place each, in channels_last, between convolutions."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(channels, channels, 3, 2, 1), nn.BatchNorm2d(channels)
        self.up, self.mix = nn.ConvTranspose2d(channels, channels, 2, 2), nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.up(torch.relu(self.norm(self.down(x))))).square().mean()


@pytest.mark.parametrize("options", [{"recompute": "none"}, {"memory_budget": 0.0}], ids=str)
@pytest.mark.parametrize("dynamic", [None, True])
def test_nothing_is_written_over_what_lies_otherwise(options: dict[str, Any], dynamic: bool | None) -> None:
    torch.manual_seed(0)
    model = _ThroughOnePlace().to(memory_format=torch.channels_last)
    batch = {"x": torch.randn(2, 16, 2, 2).contiguous(memory_format=torch.channels_last)}
    step, _ = compiled_step(model, batch, stages=2, dynamic=dynamic, **options)
    assert_bitwise(step, aot_eager_step(model, batch))
