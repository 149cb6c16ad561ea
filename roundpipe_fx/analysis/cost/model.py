"""What passes ask of a cost model, whichever it is."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import fx

__all__ = ["CostModel"]


class CostModel(Protocol):
    """Seconds of operations and transfers on one device."""

    @property
    def overhead(self) -> float:
        """Seconds that launching an operation costs, whatever its size."""

    @property
    def host(self) -> float:
        """Bytes a second between the device and the host."""

    def seconds(self, flops: int, traffic: int, dtype: torch.dtype = ...) -> float:
        """Modelled seconds of ``flops`` operations that move ``traffic`` bytes."""

    def node_seconds(self, node: fx.Node, flops: int, traffic: int, dtype: torch.dtype) -> float:
        """Seconds of a node's operation, which has so many flops and moves so many bytes."""

    def transfer_seconds(self, size: int) -> float:
        """Modelled seconds of sending ``size`` bytes to another device."""
