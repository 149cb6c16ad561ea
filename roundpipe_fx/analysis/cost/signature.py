"""Signatures of operator calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from roundpipe_fx.torch_private import size_hint


def signature_of(node: fx.Node, single: bool = False) -> str:
    """A text of the operator with shapes, strides and dtypes of its operands, and its other arguments.

    Args:
        node: the node.
        single: whether sizes are left out, as if all operands had one element.
    """

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return text(value.meta.get("val"))
        if isinstance(value, torch.Tensor):
            if single:
                return str(value.dtype)
            lazy = f"{' conj' * value.is_conj()}{' neg' * value.is_neg()}"
            return f"{value.dtype}{lazy}{[*map(size_hint, value.shape)]}{[*map(size_hint, value.stride())]}"
        if isinstance(value, list | tuple):
            return f"({', '.join(map(text, value))})"
        return str(size_hint(value) if isinstance(value, torch.SymInt) else value)

    named = ", ".join(f"{name}={text(value)}" for name, value in node.kwargs.items())
    target = node.target if isinstance(node.target, torch._ops.OpOverload) else _name_of(node.target)
    return f"{target}{text(node.args)}{named}"


def _name_of(target: Any) -> str:
    """The same in every process."""
    return f"{target.__module__}.{target.__qualname__}" if hasattr(target, "__qualname__") else str(target)
