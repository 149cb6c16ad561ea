"""Calls of operators on real tensors, as nodes with fake values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_map

__all__ = ["RealCall", "call", "node_of"]


@dataclass(frozen=True)
class RealCall:
    """Arguments of an operator."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> RealCall:
    return RealCall(args, kwargs)


def node_of(target: Any, *args: Any, dynamic: bool = False, **kwargs: Any) -> fx.Node:
    """A graph's only call, with fake values; each tensor among the arguments is an input of the graph.

    Args:
        target: an operator.
        *args: its arguments, with real tensors.
        dynamic: whether all sizes of the tensors are symbolic.
        **kwargs: its arguments, with real tensors.
    """
    graph, mode = fx.Graph(), FakeTensorMode(shape_env=ShapeEnv())

    def as_input(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("operand")
        context = None
        if dynamic:
            kinds = [torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC] * value.dim()
            context = StatelessSymbolicContext(dynamic_sizes=kinds)
        node.meta["val"] = mode.from_tensor(value, symbolic_context=context, static_shapes=not dynamic)
        return node

    args, kwargs = tree_map(as_input, (args, kwargs))
    node = graph.call_function(target, args, kwargs)
    fakes, named = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
    with mode, torch.no_grad():
        node.meta["val"] = target(*fakes, **named)
    return node
