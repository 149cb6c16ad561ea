"""Cumulative batch norm in one graph: layers whose running statistics are means over all batches (``momentum=None``).

Their factor is one divided by the number of batches, which PyTorch's layer reads as a Python number; there the graph of
a pipeline would break. Here the factor stays a tensor. The layer's output and gradients are the same, bit by bit;
running statistics are equal within rounding.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from roundpipe_fx.torch_private import AnyBatchNorm

__all__ = ["cumulative"]


@contextlib.contextmanager
def cumulative(model: nn.Module) -> Iterator[None]:
    """Context manager in which layers of ``model`` with cumulative statistics can be traced in one graph.

    Layers with a ``forward`` of their own are left as they are.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, AnyBatchNorm) and _is_cumulative(layer)]
    for layer in layers:
        layer.__dict__["forward"] = functools.partial(_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _is_cumulative(layer: AnyBatchNorm) -> bool:
    is_plain = type(layer).forward is AnyBatchNorm.forward and "forward" not in layer.__dict__
    return is_plain and layer.momentum is None and layer.track_running_stats and layer.running_mean is not None


def _forward(layer: AnyBatchNorm, x: torch.Tensor) -> torch.Tensor:
    mean, variance, count = layer.running_mean, layer.running_var, layer.num_batches_tracked
    if not layer.training or mean is None or variance is None or count is None:
        return AnyBatchNorm.forward(layer, x)
    layer._check_input_dim(x)
    count.add_(1)
    batch_mean, batch_variance = torch.zeros_like(mean), torch.zeros_like(variance)
    normalized = F.batch_norm(x, batch_mean, batch_variance, layer.weight, layer.bias, True, 1.0, layer.eps)
    with torch.no_grad():
        factor = 1 / count.to(mean.dtype)
        mean.lerp_(batch_mean, factor)
        variance.lerp_(batch_variance, factor.to(variance.dtype))
    return normalized
