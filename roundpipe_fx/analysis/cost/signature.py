"""Signatures of operator calls, and made-up arguments to run an operator alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from roundpipe_fx.torch_private import number_hint, size_hint, tree_map

__all__ = ["made_up_arguments", "signature_of"]


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


def made_up_arguments(
    node: fx.Node, device: torch.device, fill: Callable[[torch.Tensor], torch.Tensor], single: bool = False
) -> tuple[Any, Any]:
    """Positional and keyword arguments like those of a node, with real tensors.

    Args:
        node: the node.
        device: the device of the tensors.
        fill: fills a tensor with numbers.
        single: whether tensors have one element.
    """

    def real(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return tree_map(real, value.meta.get("val"))
        if isinstance(value, torch.Tensor):
            shape = [1 if single else size_hint(size) for size in value.shape]
            stride = [size_hint(step) for step in value.stride()]
            made = fill(torch.empty_strided(shape, stride, dtype=value.dtype, device=device))
            # Kernels that do not support the conjugate and negative bits copy such an operand first.
            made = made.conj() if value.is_conj() else made
            return torch.ops.aten._neg_view.default(made) if value.is_neg() else made
        return number_hint(value)

    args, kwargs = tree_map(real, (node.args, node.kwargs))
    return args, kwargs
