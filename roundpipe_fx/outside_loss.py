"""The loss outside: what a loss takes that the caller computes from a model's outputs.

Between the forward and the backward runs code that nobody traced. Where a model returns no loss, its outputs are what
the loss is computed from, and a cross-entropy (the usual one, and the largest) holds three times their bytes: the
logarithms of the softmax, the gradient of these, and the gradient of the outputs, which then comes in. A plan leaves
room for that.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from roundpipe_fx.cost.of_node import tensor_bytes
from roundpipe_fx.joint_graph import tensor_values

__all__ = ["loss_bytes"]

_TIMES = 3
_NUMBER = 8
"""Bytes of the loss itself, and of how many labels there are."""


def loss_bytes(tangents: Collection[fx.Node], granularity: int = 1) -> int:
    """Bytes that a loss outside takes at most at one time, before the incoming gradients are counted.

    Args:
        tangents: the incoming gradients that a step is expected to bring. If one is of a single number, that is the
            loss, and nothing is left to do outside.
        granularity: what the device's allocator rounds sizes up to, in bytes.
    """
    values = [value for node in tangents for value in tensor_values(node)]
    if not values or any(value.dim() == 0 for value in values):
        return 0
    sizes = [*(tensor_bytes([value]) for value in values for _ in range(_TIMES)), _NUMBER, _NUMBER]
    return sum(-(-size // granularity) * granularity for size in sizes)
