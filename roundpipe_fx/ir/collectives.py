"""Collectives: operations that all processes of a group run, in the same order, or all of them wait for ever.

Processes plan on their own, and plans may differ: shards are uneven, devices have different memory. So communication
must not depend on what is recomputed, and when. A collective of the forward runs once, in the forward.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

__all__ = ["is_collective"]

_NAMESPACES = frozenset(
    ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "c10d_functional", "symm_mem")
)
"""Of the operators of functional collectives, DTensor, process groups and symmetric memory."""


def is_collective(target: Any) -> TypeGuard[torch._ops.OpOverload]:
    """Whether a node's target communicates with other processes, or waits for communication."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES
