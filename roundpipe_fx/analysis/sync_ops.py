"""Registry of custom operators that force a host synchronization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["register_sync_op", "registered_sync_ops"]

_registered: set[Any] = set()


def register_sync_op(op: Callable[..., Any]) -> None:
    """Declare that a custom operator makes the host wait for the device, or decides a shape or a route.

    Models compiled afterwards run it once per step, in the forward, and save its results; recomputation never runs it
    again.

    Args:
        op: the operator: ``torch.ops.mylib.myop``, one overload of it, or the result of ``torch.library.custom_op``.

    Raises:
        TypeError: ``op`` is not an operator. Python functions are traced through, so declaring one would have no
            effect.
    """
    op = getattr(op, "_opoverload", op)
    if not isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        raise TypeError(
            f"register_sync_op takes an operator (torch.ops.<namespace>.<name>, or the result of "
            f"torch.library.custom_op), not {type(op).__name__}."
        )
    _registered.add(op)


def registered_sync_ops() -> frozenset[Any]:
    """The operators that have been declared."""
    return frozenset(_registered)
