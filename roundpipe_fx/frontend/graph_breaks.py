"""Graph breaks: places where a model could not be traced as one graph. The user is warned of each place once.

There are two kinds. After most breaks tracing continues, and each part is a separate graph. If the break is in a loop,
Dynamo skips the whole function: it runs eagerly, and only the functions that it calls are compiled.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from roundpipe_fx import torch_private
from roundpipe_fx.torch_private import UserLine

__all__ = ["GraphBreakWarning", "around_compilations", "warn_of_graph_break"]


class GraphBreakWarning(UserWarning):
    """The model could not be traced as one graph; its parts were compiled separately."""


def warn_of_graph_break(
    module: fx.GraphModule, warned: set[UserLine], budgeted: bool, outside: Callable[[UserLine, str], None]
) -> None:
    """Warn of the break that ended a graph, if there was one.

    Args:
        module: Dynamo's graph.
        warned: lines that the user has been warned of; extended.
        budgeted: whether there is a memory budget, to which the warning then refers.
        outside: called with the line and the reason of the break.
    """
    reason = torch_private.graph_break(module)
    if reason is not None:
        _warn_of_reason(reason, warned, budgeted, outside)


def _warn_of_reason(
    reason: Any, warned: set[UserLine], budgeted: bool, outside: Callable[[UserLine, str], None]
) -> None:
    line = torch_private.line_of_break(reason)
    outside(line, reason.reason)
    parts = "Each part is compiled separately, and no decision reaches across the break."
    _warn(line, parts, reason.reason, warned, budgeted)


@contextlib.contextmanager
def around_compilations(
    warned: set[UserLine], budgeted: bool = False, outside: Callable[[UserLine, str], None] = lambda line, why: None
) -> Iterator[None]:
    """Context manager around Dynamo's compilation of a frame: sets flags, warns of breaks and of skipped functions.

    Arguments as for :func:`warn_of_graph_break`.
    """
    with (
        torch_private.dynamo_flags(),
        torch_private.untraced_functions() as untraced,
        torch_private.graph_breaks() as broken,
    ):
        yield  # an error that is raised here says enough
    for line, reason in untraced:
        outside(line, reason)
        parts = f"{line.function} runs eagerly; the functions that it calls are compiled separately."
        what, _, why = reason.partition("\n")
        explained = why.strip().removeprefix("Explanation: ").partition("\n")[0]
        _warn(line, parts, f"{what}. {explained}", warned, budgeted)
    told = {line for line, _ in untraced}
    for broke in broken:  # breaks with nothing to compile before them have not been reported yet
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
