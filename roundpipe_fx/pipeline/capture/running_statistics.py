"""Running statistics of batch norm, though a step sees batches as microbatches.

Deferred, as in torchgpipe (``DeferredBatchNorm``; Kim et al., "torchgpipe", 2020), they are those of whole batches:
each microbatch is normalized by its own statistics, but the running ones are updated once per step, from sums over all
microbatches, to the values that a step without microbatches would give them.

Layers with cumulative statistics, means over all batches (``momentum=None``), are traced in one graph. Their factor is
one divided by the number of batches, which PyTorch's layer reads as a Python number; there the graph would break. Here
the factor stays a tensor. The layer's output and gradients are the same, bit by bit; running statistics are equal
within rounding.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from roundpipe_fx.torch_private import AnyBatchNorm


class _Sums:
    """The sums of a batch norm layer in the current step."""

    def __init__(self, layer: AnyBatchNorm) -> None:
        assert layer.running_mean is not None and layer.running_var is not None
        self.total = torch.zeros_like(layer.running_mean, dtype=torch.float32)
        self.squares = torch.zeros_like(layer.running_var, dtype=torch.float32)
        self.count = torch.zeros((), dtype=torch.long, device=self.total.device)


_sums: weakref.WeakKeyDictionary[nn.Module, _Sums] = weakref.WeakKeyDictionary()


def _forward(layer: AnyBatchNorm, sums: _Sums, x: torch.Tensor) -> torch.Tensor:
    layer._check_input_dim(x)
    # In evaluation the running statistics are read and nothing is summed up.
    if not layer.training:
        return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, 0.0, layer.eps)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    seen = x.detach().float()
    sums.total.add_(seen.sum(dims))
    sums.squares.add_(seen.square().sum(dims))
    # Number of values of each channel: ``[8, 3, 4, 4]`` adds 8·4·4 = 128.
    sums.count.add_(x.numel() // x.shape[1])
    # Without running statistics: the batch's own are used, and nothing is updated here.
    return F.batch_norm(x, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)


@contextlib.contextmanager
def defer_statistics(model: nn.Module) -> Iterator[None]:
    """Context manager in which batch norm layers of ``model`` accumulate sums; on exit without an error they update
    statistics."""
    layers = [
        m
        for m in model.modules()
        if isinstance(m, AnyBatchNorm) and m.track_running_stats and m.running_mean is not None
    ]
    for layer in layers:
        sums = _sums.get(layer)
        assert layer.running_mean is not None
        if sums is None or sums.total.device != layer.running_mean.device:
            sums = _sums[layer] = _Sums(layer)
        # In ``__dict__``, where it goes before the class's method, and is removed without a trace.
        layer.__dict__["forward"] = functools.partial(_forward, layer, sums)
    try:
        yield
        for layer in layers:
            _update(layer, _sums[layer])
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
            sums = _sums[layer]
            for value in (sums.total, sums.squares, sums.count):
                value.zero_()


def tensors_of_sums(model: nn.Module) -> list[torch.Tensor]:
    """The sums of the batch norm layers of ``model``, on the devices of their statistics."""
    of_layers = [_sums[layer] for layer in model.modules() if layer in _sums]
    return [value for sums in of_layers for value in (sums.total, sums.squares, sums.count)]


@torch.no_grad()
def _update(layer: AnyBatchNorm, sums: _Sums) -> None:
    assert layer.running_mean is not None and layer.running_var is not None and layer.num_batches_tracked is not None
    if not layer.training:
        return
    layer.num_batches_tracked.add_(1)
    share = 1 / layer.num_batches_tracked.float() if layer.momentum is None else layer.momentum
    mean = sums.total / sums.count
    # Unbiased, as PyTorch has it for running statistics.
    # ``E[x²] − E[x]²`` times ``n / (n − 1)``.
    variance = (sums.squares / sums.count - mean.square()) * (sums.count / (sums.count - 1))
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), torch.as_tensor(share, device=mean.device))
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), torch.as_tensor(share, device=mean.device))


@contextlib.contextmanager
def trace_cumulative_statistics(model: nn.Module) -> Iterator[None]:
    """Context manager in which layers of ``model`` with cumulative statistics can be traced in one graph.

    Layers with a ``forward`` of their own are left as they are.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, AnyBatchNorm) and _is_cumulative(layer)]
    for layer in layers:
        layer.__dict__["forward"] = functools.partial(_cumulative_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _is_cumulative(layer: AnyBatchNorm) -> bool:
    is_plain = type(layer).forward is AnyBatchNorm.forward and "forward" not in layer.__dict__
    return is_plain and layer.momentum is None and layer.track_running_stats and layer.running_mean is not None


def _cumulative_forward(layer: AnyBatchNorm, x: torch.Tensor) -> torch.Tensor:
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
