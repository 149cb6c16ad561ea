"""Graph breaks: where a model could not be traced as one graph. The user is told of each place once.

There are two kinds. After most breaks tracing goes on, and each part is a graph of its own. Where a break lies in a
loop, Dynamo gives the whole function up: it runs eagerly, and only what it calls is compiled.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from roundpipe_fx import torch_private
from roundpipe_fx.torch_private import UserLine

__all__ = ["GraphBreakWarning", "around_calls", "warn_of_graph_break"]


class GraphBreakWarning(UserWarning):
    """The model could not be traced as one graph; the parts were compiled each on its own."""


def warn_of_graph_break(
    module: fx.GraphModule, warned: set[UserLine], budgeted: bool, outside: Callable[[UserLine, str], None]
) -> None:
    """Tell of the break that ended a graph, if one did.

    Args:
        module: Dynamo's graph.
        warned: lines that the user was told of already; extended.
        budgeted: whether there is a memory budget, about which there is more to say.
        outside: told the line, and why: what it does is part of no graph.
    """
    reason = torch_private.graph_break(module)
    if reason is not None:
        _warn_of_reason(reason, warned, budgeted, outside)


def _warn_of_reason(
    reason: Any, warned: set[UserLine], budgeted: bool, outside: Callable[[UserLine, str], None]
) -> None:
    line = torch_private.line_of_break(reason)
    outside(line, reason.reason)
    parts = "Each part is compiled on its own, and nothing is decided across the break."
    _warn(line, parts, reason.reason, warned, budgeted)


@contextlib.contextmanager
def around_calls(
    warned: set[UserLine], budgeted: bool = False, outside: Callable[[UserLine, str], None] = lambda line, why: None
) -> Iterator[None]:
    """Around each call of what is compiled: Dynamo's flags for it, and news of functions that it gave up.

    The arguments are those of :func:`warn_of_graph_break`.
    """
    error = sys.exception()
    with (
        torch_private.dynamo_flags(),
        torch_private.untraced_functions() as untraced,
        torch_private.graph_breaks() as broken,
    ):
        yield
    if sys.exception() is not error:  # Dynamo leaves without telling of the call's error, which says enough
        return
    for line, reason in untraced:
        outside(line, reason)
        parts = f"{line.function} runs eagerly; what it calls is compiled on its own."
        what, _, why = reason.partition("\n")
        explained = why.strip().removeprefix("Explanation: ").partition("\n")[0]
        _warn(line, parts, f"{what}. {explained}", warned, budgeted)
    told = {line for line, _ in untraced}
    for broke in broken:  # where there was nothing to compile before it, nobody has told of it yet
        if torch_private.line_of_break(broke) not in told:
            _warn_of_reason(broke, warned, budgeted, outside)


def _warn(line: UserLine, parts: str, reason: str, warned: set[UserLine], budgeted: bool) -> None:
    if line in warned:
        return
    warned.add(line)
    budget = " A memory budget bounds what the graphs hold together, not what runs eagerly." if budgeted else ""
    text = (
        f"roundpipe_fx: the model was not traced as one graph; it breaks at {line}. {parts}{budget} "
        f"Use fullgraph=True to make this an error. Reason: {reason}"
    )
    warnings.warn_explicit(text, GraphBreakWarning, line.file, line.number)
