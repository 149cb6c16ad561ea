"""Branches on random numbers that can go one way only: layer drop with a probability of zero.

``if torch.rand([]) < self.layerdrop: continue`` stands in the layer loop of many models, and Dynamo breaks the graph
there, at each layer, also where ``layerdrop`` is 0, as it is by default. Numbers of ``torch.rand`` lie in [0, 1), so
the comparison is then known while tracing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

__all__ = ["install_known_branches", "resolved_random_branch"]


def install_known_branches(active: Callable[[], bool]) -> None:
    """Let Dynamo not break where a random number decides nothing; the comparison stays in the graph.

    Dynamo's tensors become constants where they are known: before it breaks at a branch it asks for that.

    Args:
        active: whether what this thread traces is ours.
    """
    from torch._dynamo.variables.tensor import TensorVariable

    if "as_python_constant" in vars(TensorVariable):
        return

    def as_python_constant(self: Any) -> Any:
        # Bodies of higher-order operators break nothing: what they draw must stay with them.
        if active() and self.proxy.tracer.parent is None:
            known = _outcome(self.proxy.node)
            if known is not None:
                return known
        return super(TensorVariable, self).as_python_constant()

    TensorVariable.as_python_constant = as_python_constant  # type: ignore[method-assign]


def resolved_random_branch(node: fx.Node) -> fx.Node | None:
    """The random number of a comparison in Dynamo's graph whose outcome was known; else ``None``."""
    return None if _outcome(node) is None else next(arg for arg in node.args if _is_draw(arg))  # type: ignore[return-value]


_MIRRORED = {operator.lt: operator.gt, operator.le: operator.ge, operator.gt: operator.lt, operator.ge: operator.le}


def _is_draw(arg: Any) -> bool:
    return isinstance(arg, fx.Node) and arg.op == "call_function" and arg.target is torch.rand


def _outcome(node: fx.Node) -> bool | None:
    """What a comparison of a random number with another gives, whatever is drawn; else ``None``."""
    if node.op != "call_function" or node.target not in _MIRRORED:
        return None
    compare, (left, right) = node.target, node.args
    if _is_draw(right):
        compare, left, right = _MIRRORED[compare], right, left
    limit = _number(right)
    if not _is_draw(left) or limit is None:
        return None
    if limit >= 1:
        return compare in (operator.lt, operator.le)
    if limit < 0 or (limit == 0 and compare in (operator.lt, operator.ge)):
        return compare in (operator.gt, operator.ge)
    return None


def _number(arg: Any) -> Any:
    """A number, or one that may vary from call to call and is guarded as it is compared."""
    if isinstance(arg, int | float):
        return arg
    value = arg.meta.get("example_value") if isinstance(arg, fx.Node) else None
    varies = isinstance(value, torch.SymInt | torch.SymFloat) and not free_unbacked_symbols(value)
    return value if varies else None
