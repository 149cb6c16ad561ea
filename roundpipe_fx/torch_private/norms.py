"""Base classes of normalization layers with running statistics, in any number of dimensions."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm

__all__ = ["AnyBatchNorm", "RunningNorm"]
