"""Branches on random numbers whose outcome is known, such as layer drop with a probability of zero.

BART, OPT, Wav2Vec2, Whisper and more than 30 other models of Hugging Face Transformers have ``if torch.rand([]) <
self.layerdrop: continue`` in their loop over layers, and Dynamo breaks the graph there at each layer, even if
``layerdrop`` is 0, which is the default. A budget then holds for each part alone, and no segment spans two layers.
``torch.rand`` returns numbers in [0, 1), so the outcome of the comparison is known while tracing.
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
    """Keep Dynamo from breaking the graph at branches with a known outcome; the comparison stays in the graph.

    Before Dynamo breaks at a branch, it asks whether the tensor is a constant; then it is one if its value is known.

    Args:
        active: whether the current thread traces one of our compilations.
    """
    from torch._dynamo.variables.tensor import TensorVariable

    if "as_python_constant" in vars(TensorVariable):
        return

    def as_python_constant(self: Any) -> Any:
        # Not in bodies of higher-order operators, which must keep their random operations.
        if active() and self.proxy.tracer.parent is None:
            outcome = _outcome(self.proxy.node)
            if outcome is not None:
                return outcome
        return super(TensorVariable, self).as_python_constant()

    TensorVariable.as_python_constant = as_python_constant  # type: ignore[method-assign]


def resolved_random_branch(node: fx.Node) -> fx.Node | None:
    """The random number of a comparison in Dynamo's graph whose outcome is known; ``None`` for other nodes."""
    return None if _outcome(node) is None else next(arg for arg in node.args if _is_draw(arg))  # type: ignore[return-value]


_MIRRORED = {operator.lt: operator.gt, operator.le: operator.ge, operator.gt: operator.lt, operator.ge: operator.le}


def _is_draw(arg: Any) -> bool:
    return isinstance(arg, fx.Node) and arg.op == "call_function" and arg.target is torch.rand


def _outcome(node: fx.Node) -> bool | None:
    """The outcome of a comparison with a random number; ``None`` if it depends on that, or for other nodes."""
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
    """A number, or a symbolic one, on whose comparison Dynamo guards; ``None`` for other arguments."""
    if isinstance(arg, int | float):
        return arg
    value = arg.meta.get("example_value") if isinstance(arg, fx.Node) else None
    varies = isinstance(value, torch.SymInt | torch.SymFloat) and not free_unbacked_symbols(value)
    return value if varies else None
