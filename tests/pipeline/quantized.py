"""Frozen weights as integers, in the two ways in which libraries have them: as torchao, a tensor around others, and as
bitsandbytes, with scales in an object beside the integers."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from tests.hugging_face import llama
from tests.pipeline.steps import Blocks

aten = torch.ops.aten


class RowScaled(torch.Tensor):
    """Integers and a scale for each row."""

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor) -> RowScaled:
        strides, device = integers.stride(), integers.device
        return torch.Tensor._make_wrapper_subclass(
            cls, integers.shape, strides=strides, dtype=scale.dtype, device=device
        )

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor) -> None:
        self.integers, self.scale = integers, scale

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"RowScaled({tuple(self.shape)})"  # PyTorch writes it to its logs, also of one without values

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: None, *sizes: Any) -> RowScaled:
        return RowScaled(inner["integers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return RowScaled(*(func(own, *args[1:], **(kwargs or {})) for own in (args[0].integers, args[0].scale)))
        args, kwargs = tree_map(_numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


def _numbers(value: Any) -> Any:
    return value.integers.to(value.scale.dtype) * value.scale if isinstance(value, RowScaled) else value


class State:
    """Scales, and what is added to them in an object of its own."""

    def __init__(self, values: torch.Tensor, inner: State | None) -> None:
        self.values = values
        self.inner = inner
        self.bits = 8


class Linear8bit(nn.Module):
    def __init__(self, integers: torch.Tensor, scale: torch.Tensor, bias: nn.Parameter) -> None:
        super().__init__()
        self.weight = nn.Parameter(integers, requires_grad=False)
        self.weight.quant_state = State(scale - 1, State(torch.ones(1), None))
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.weight.quant_state
        return F.linear(x, self.weight.to(x.dtype) * (state.values + state.inner.values), self.bias)


def blocks(kind: str | None) -> tuple[nn.Module, int]:
    """A model whose biases are trained, and the bytes of all its tensors.

    Args:
        kind: ``None``: the weights are numbers of 32 bits.
    """
    torch.manual_seed(0)
    model, size = Blocks(16, 4), 0
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            integers = torch.randint(-127, 128, layer.weight.shape, dtype=torch.int8)
            scale = torch.randint(1, 9, (len(integers), 1)) / 256 + 1  # such that nothing is rounded in taking one away
            if kind == "state":
                model.set_submodule(name, Linear8bit(integers, scale, layer.bias))
            else:
                weight = RowScaled(integers, scale)
                layer.weight = nn.Parameter(weight if kind == "tensor" else _numbers(weight), requires_grad=False)
            size += 4 * (len(integers) + layer.bias.numel() + (kind == "state"))
            size += integers.nbytes if kind else 4 * (integers.numel() - len(integers))
    return model, size


def _torchao(model: nn.Module) -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def is_within_a_layer(layer: nn.Module, name: str) -> bool:
        return isinstance(layer, nn.Linear) and name != "lm_head"

    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), filter_fn=is_within_a_layer)


def _bitsandbytes(model: nn.Module) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            made = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            model.set_submodule(name, made.to("cpu"))  # which quantizes


def with_adapters(library: str) -> nn.Module:
    """A small Llama whose layers a library has quantized, with adapters. Without the library the test is skipped."""
    torch.manual_seed(0)
    model = llama(layers=1).bfloat16()
    {"torchao": _torchao, "bitsandbytes": _bitsandbytes}[library](model)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, config)
