"""Dynamo's graphs of functions, for what works on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


class _Traced(Exception):
    """Ends a call before it computes anything."""


def dynamo_graph(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = False) -> fx.GraphModule:
    """The graph of a call, as a backend gets it.

    Args:
        function: what is traced, in one graph.
        inputs: its arguments.
        dynamic: ``True``: with symbols for sizes.
    """
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(module)
        return stop

    def stop(*_: Any) -> Any:
        raise _Traced

    torch._dynamo.reset()
    with contextlib.suppress(_Traced):
        torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    return graphs[0]
