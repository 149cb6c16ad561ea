"""Calls of operators on real tensors, as nodes with fake values."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_map

from roundpipe_fx.analysis.dimensions import Dimensions
from roundpipe_fx.analysis.dimensions.labels import Dims

__all__ = ["RealCall", "call", "node_of", "text"]


@dataclass(frozen=True)
class RealCall:
    """Arguments of an operator."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> RealCall:
    return RealCall(args, kwargs)


def node_of(target: Any, *args: Any, dynamic: DimDynamic = DimDynamic.STATIC, **kwargs: Any) -> fx.Node:
    """A graph's only call, with fake values; each tensor among the arguments is an input of the graph.

    Args:
        target: an operator.
        *args: its arguments, with real tensors.
        dynamic: whether all sizes of the tensors are symbolic, and equal ones the same symbol.
        **kwargs: its arguments, with real tensors.
    """
    graph, mode = fx.Graph(), FakeTensorMode(shape_env=ShapeEnv())

    def as_input(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("operand")
        context = StatelessSymbolicContext(dynamic_sizes=[dynamic] * value.dim())
        node.meta["val"] = mode.from_tensor(value, symbolic_context=context)
        return node

    args, kwargs = tree_map(as_input, (args, kwargs))
    node = graph.call_function(target, args, kwargs)
    fakes, named = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
    with mode, torch.no_grad():
        node.meta["val"] = target(*fakes, **named)
    return node


def text(dimensions: Dimensions | None) -> str:
    """Dimensions in the way of einops: a letter for each label, a capital one if it is mixed, 1 for a size of 1."""
    if dimensions is None:
        return "unknown"
    letters: dict[int, str] = {}

    def letter(label: int) -> str:
        small = letters.setdefault(label, string.ascii_lowercase[len(letters)])
        return small.upper() if label in dimensions.mixed else small

    def tensors(described: tuple[Dims, ...]) -> str:
        return ", ".join(" ".join("".join(map(letter, dim)) or "1" for dim in dims) or "()" for dims in described)

    operands = tensors(dimensions.operands)
    return f"{operands} -> {tensors(dimensions.results)}".strip()
