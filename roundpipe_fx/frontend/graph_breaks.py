"""Graph breaks: places where a model could not be traced as one graph. The user is warned of each place once.

There are two kinds. After most breaks tracing continues, and each part is a separate graph. If the break is in a loop,
Dynamo skips the whole function: it runs eagerly, and only the functions that it calls are compiled::

    def forward(self, x):                           def forward(self, x):
        x = self.first(x)            graph 1            for layer in self.layers:            eager
        torch._dynamo.graph_break()                         x = layer(x)                     layer.forward: a graph
        return self.last(x)          graph 2                torch._dynamo.graph_break()      eager
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from roundpipe_fx import torch_private
from roundpipe_fx.budget import bytes_text
from roundpipe_fx.frontend.known_functions import known_functions_in_graph
from roundpipe_fx.frontend.packed_sequences import trace_packed_sequences
from roundpipe_fx.torch_private import CompiledFrame, RecompileLimit, UserLine


class GraphBreakWarning(UserWarning):
    """The model could not be traced as one graph; its parts were compiled separately."""


def warn_of_graph_break(
    module: fx.GraphModule, warned: set[UserLine], budgeted: bool, outside: Callable[[UserLine, str], None]
) -> None:
    """Warn of the break that ended a graph, if there was one.

    Args:
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
    frame: CompiledFrame,
    warned: set[UserLine],
    budget: int | float | None = None,
    outside: Callable[[UserLine, str], None] = lambda line, why: None,
    pipelined: bool = False,
) -> Iterator[None]:
    """Context manager around Dynamo's compilation of a frame: sets flags, warns of breaks and of skipped functions.

    Args:
        warned: lines that the user has been warned of; extended.
        budget: the memory budget, to which warnings then refer.
        outside: called with the line and the reason of what runs eagerly.
        pipelined: whether the frame is part of a pipeline.
    """
    budgeted = budget is not None
    trace_packed_sequences()
    with (
        torch_private.rare_collections(),
        torch_private.dynamo_flags(pipelined),
        known_functions_in_graph(),
        torch_private.untraced_functions(frame.code) as untraced,
        torch_private.graph_breaks() as broken,
    ):
        try:
            yield  # an error that is raised here says enough, but for one
        except torch_private.recompile_limit_errors() as error:
            limit = torch_private.limit_of_error(error)
            if limit is None:
                raise
            line = UserLine(frame.code.co_filename, frame.code.co_firstlineno, frame.code.co_qualname)
            raise type(error)(_describe_limit(line, limit, budget, is_error=True)) from error
    for line, reason, limit in untraced:
        outside(line, reason)
        if limit is not None:
            text = _describe_limit(line, limit, budget, is_error=False)
            _warn_once(line, f"roundpipe_fx: {text}", warned)
            continue
        parts = f"{line.function} runs eagerly; the functions that it calls are compiled separately."
        summary, _, why = reason.partition("\n")
        explained = why.strip().removeprefix("Explanation: ").partition("\n")[0]
        _warn(line, parts, f"{summary}. {explained}", warned, budgeted)
    reported = {line for line, _, _ in untraced}
    for broke in broken:  # breaks with nothing to compile before them have not been reported yet
        if torch_private.line_of_break(broke) not in reported:
            _warn_of_reason(broke, warned, budgeted, outside)


def _warn(line: UserLine, parts: str, reason: str, warned: set[UserLine], budgeted: bool) -> None:
    budget = " A memory budget bounds what the graphs hold together, not what runs eagerly." if budgeted else ""
    text = (
        f"roundpipe_fx: the model was not traced as one graph; it breaks at {line}. {parts}{budget} "
        f"Use fullgraph=True to make this an error. Reason: {reason}"
    )
    _warn_once(line, text, warned)


def _warn_once(line: UserLine, text: str, warned: set[UserLine]) -> None:
    if line not in warned:
        warned.add(line)
        warnings.warn_explicit(text, GraphBreakWarning, line.file, line.number)


_EQUAL_TO_NUMBER = re.compile(r"(.*\S)\s*==\s*[-+\d.einf]+")


def _describe_limit(line: UserLine, limit: RecompileLimit, budget: int | float | None, is_error: bool) -> str:
    """Say that a limit on compilations was reached, what that means for a budget, and what to change.

    Args:
        line: where the function begins.
        budget: the memory budget, if there is one.
        is_error: whether the call failed. Otherwise it ran eagerly.
    """
    kept = "no plan applies" if budget is None else f"the memory_budget of {_budget_text(budget)} is not kept"
    effect = "the call failed" if is_error else f"{kept} from now on"
    number = _EQUAL_TO_NUMBER.fullmatch(limit.guard)
    eagerly = (
        ""
        if is_error
        else " Calls that none of its compilations serves run eagerly as a whole, without a plan; so do, without "
        "another word, those of further models with this forward that are compiled in place or by torch.compile."
    )
    if number is not None:
        why = (
            f" A Python number takes another value each time: the last one was compiled for {limit.guard}. If it only "
            f"scales something, keep {number.group(1)} as a tensor (a buffer) or pass it to the model as an argument; "
            "if it is only counted, count outside of forward."
        )
    else:
        why = f" It was compiled last for: {limit.guard}." if limit.guard else ""
    advice = "" if is_error else " Use fullgraph=True to make this an error."
    return (
        f"the recompile limit was reached, so {effect}: {line.function} ({line.file}:{line.number}) was compiled as "
        f"often as torch._dynamo.config.{limit.name} ({limit.number}) allows.{eagerly}{why} Or raise the limit. "
        f"TORCH_LOGS=recompiles tells of each compilation.{advice}"
    )


def _budget_text(budget: int | float) -> str:
    return f"{budget} bytes ({bytes_text(budget)})" if isinstance(budget, int) else str(budget)
