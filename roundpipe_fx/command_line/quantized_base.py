"""Quantized bases on paper: frozen weights as integers with scales, which a step turns into numbers when it needs them.

::

    nf4    4 bits a weight, and a float32 scale for each 64: bitsandbytes' Linear4bit
    int8   8 bits a weight, and a scale for each row: torchao's Int8WeightOnlyConfig

Such a layer multiplies with numbers of the model's dtype, which it makes in the forward and once more in the backward,
and keeps for neither. There are sizes and modelled seconds, and no kernels: these are the libraries'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

KINDS = ("nf4", "int8")
_BLOCK = 64
"""Weights that share a scale in NF4."""


@torch.library.custom_op("roundpipe_fx::dequantize", mutates_args=())
def _dequantize(integers: torch.Tensor, scales: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    raise NotImplementedError("a model with --quantize is planned for, and not run")


@_dequantize.register_fake
def _(integers: torch.Tensor, scales: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    # Two weights of four bits lie in each byte (``uint8``).
    weights = integers.numel() * (2 if integers.dtype is torch.uint8 else 1)
    return integers.new_empty(rows, weights // rows, dtype=dtype)


class _Product(torch.autograd.Function):
    """A product with weights that are dequantized in the forward, and again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, integers: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
        # Integers are saved, 4 or 8 bits a weight, and not the numbers made of them, 16 bits: that is the point of
        # these layers.
        ctx.save_for_backward(integers, scales)
        ctx.rows = rows
        return F.linear(x, _dequantize(integers, scales, rows, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        # Only the input has a gradient: weights are frozen, and ``dx = dy W`` needs them once more.
        return gradient @ _dequantize(*ctx.saved_tensors, ctx.rows, gradient.dtype), None, None, None


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is integers and scales.

    Args:
        layer: whose place it takes, on the meta device.
    """

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        weights, dtype = layer.weight.numel(), layer.weight.dtype
        if kind == "nf4":
            # Like bitsandbytes: one column of bytes, two weights in each, the last byte half empty for an odd number.
            integers = torch.empty(-(-weights // 2), 1, dtype=torch.uint8, device="meta")
            scales = torch.empty(-(-weights // _BLOCK), dtype=torch.float32, device="meta")
        else:
            integers = torch.empty(layer.weight.shape, dtype=torch.int8, device="meta")
            scales = torch.empty(layer.out_features, dtype=dtype, device="meta")
        self.weight = nn.Parameter(integers, requires_grad=False)
        self.register_buffer("scales", scales)
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product, in the dtype of the input."""
        product = _Product.apply(x, self.weight, self.scales, self.out_features)
        assert isinstance(product, torch.Tensor)
        return product if self.bias is None else product + self.bias.to(x.dtype)


def quantize(model: nn.Module, kind: str) -> int:
    """Quantize the linear layers of a model but that which makes a language model's logits, as transformers does.

    Args:
        model: on the meta device; changed.

    Returns:
        how many layers that are.
    """
    # The head stays as it is, as both libraries leave it: its rounding would show in the logits directly.
    of_head: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    head = of_head()
    layers = {
        name: layer
        # Duplicates too: a layer under two names is replaced under both, by one new layer.
        for name, layer in model.named_modules(remove_duplicate=False)
        if type(layer) is nn.Linear and layer is not head
    }
    made = {id(layer): QuantizedLinear(layer, kind) for layer in layers.values()}
    for name, layer in layers.items():
        model.set_submodule(name, made[id(layer)])
    return len(made)
