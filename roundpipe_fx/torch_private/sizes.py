"""Sizes that are symbols: what to plan with, and which depend on data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

__all__ = ["assume_sizes", "assumed_sizes", "data_dependent_symbol", "shape_env_of", "size_binding", "size_hint"]


def shape_env_of(value: Any) -> Any | None:
    """The ShapeEnv behind a fake tensor or symbolic scalar, or ``None``."""
    if isinstance(value, torch.Tensor):
        mode = getattr(value, "fake_mode", None)
        return getattr(mode, "shape_env", None)
    node = getattr(value, "node", None)
    return getattr(node, "shape_env", None)


def size_binding(size: torch.SymInt) -> dict[Any, Any]:
    """``node.meta["unbacked_bindings"]`` of a node whose first dimension defines the unknown ``size``."""
    from torch.fx.experimental.symbolic_shapes import CallMethodKey
    from torch.utils._pytree import SequenceKey

    return {size.node.expr: (CallMethodKey("size"), SequenceKey(0))}


_UNKNOWN_SIZE = 1024


_LARGEST_BOUND = 1 << 40


def size_hint(size: Any) -> int:
    """A number to plan with for a size that may be symbolic.

    The traced example's value where there is one; for a data-dependent size (``nonzero``) what was assumed
    (:func:`assume_sizes`), else its upper bound, since a plan must hold for it; 1024 where no bound is known.
    """
    if isinstance(size, int):
        return size
    node = size.node
    shape_env = node.shape_env
    expression = shape_env.replace(node.expr)
    values = {}
    for symbol in expression.free_symbols:
        hint = _backed_hint(shape_env, symbol)
        if hint is None:
            hint = getattr(shape_env, _ASSUMED, {}).get(str(symbol))
        if hint is None:
            bounds = shape_env.var_to_range.get(symbol)
            upper = int(bounds.upper) if bounds is not None and bounds.upper.is_Integer else None
            hint = upper if upper is not None and upper < _LARGEST_BOUND else _UNKNOWN_SIZE
        values[symbol] = hint
    return int(expression.xreplace(values))


_ASSUMED = "roundpipe_fx_assumed_sizes"


def assume_sizes(joint: fx.GraphModule, sizes: Mapping[str, int]) -> None:
    """Let :func:`size_hint` take these values for data-dependent sizes of a graph, by symbol."""
    for node in joint.graph.nodes:
        shape_env = shape_env_of(node.meta.get("val"))
        if shape_env is not None:
            setattr(shape_env, _ASSUMED, dict(sizes))
            return


def assumed_sizes(joint: fx.GraphModule) -> dict[str, int]:
    """What :func:`assume_sizes` was given for a graph."""
    for node in joint.graph.nodes:
        shape_env = shape_env_of(node.meta.get("val"))
        if shape_env is not None:
            return dict(getattr(shape_env, _ASSUMED, {}))
    return {}


def data_dependent_symbol(size: Any) -> str | None:
    """The symbol's name, if a size is one that depends on data and nothing else."""
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.shape_env.replace(size.node.expr)
    if not expression.is_Symbol or _backed_hint(size.node.shape_env, expression) is not None:
        return None
    return str(expression)


def _backed_hint(shape_env: Any, symbol: Any) -> int | None:
    name = "backed_var_to_val" if hasattr(shape_env, "backed_var_to_val") else "var_to_val"
    value = getattr(shape_env, name).get(symbol)
    return None if value is None else int(value)
