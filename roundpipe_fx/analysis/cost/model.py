"""The interface of a cost model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import fx

__all__ = ["CostModel"]


class CostModel(Protocol):
    """Seconds of operations and transfers on one device."""

    @property
    def overhead(self) -> float:
        """Seconds of launching an operation, independent of its size."""

    @property
    def host(self) -> float:
        """Bytes per second between the device and the host."""

    def seconds(self, flops: int, traffic: int, dtype: torch.dtype = ...) -> float:
        """Modelled seconds of ``flops`` floating-point operations that read and write ``traffic`` bytes."""

    def node_seconds(self, node: fx.Node, flops: int, traffic: int, dtype: torch.dtype) -> float:
        """Seconds of a node's operation, which has ``flops`` floating-point operations and moves ``traffic`` bytes."""

    def transfer_seconds(self, size: int) -> float:
        """Modelled seconds of sending ``size`` bytes to another device."""
