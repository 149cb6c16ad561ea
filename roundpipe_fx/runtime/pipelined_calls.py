"""Pipelined calls: how a step captures the arguments that Dynamo and AOTAutograd prepare, and returns results to them.

The model is called twice for each microbatch. The first call is *captured*: guards are checked, inputs are flattened,
and the compiled forward raises its arguments as an exception instead of running. When all microbatches have run, the
second call *returns the results*: the compiled forward returns what was computed elsewhere, so that AOTAutograd updates
buffers and Dynamo assembles the model's outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["NothingCompiled", "StopAtForward", "capture_call", "pipelined", "return_results"]

_local = threading.local()


class StopAtForward(BaseException):
    """Carries the arguments of a compiled forward to :func:`capture_call`."""

    def __init__(self, graph: Any, arguments: list[Any]) -> None:
        super().__init__()
        self.graph = graph
        self.arguments = arguments


class NothingCompiled(RuntimeError):
    """A call of the model ran no compiled graph.

    Attributes:
        output: what the call returned.
    """

    def __init__(self, output: Any) -> None:
        super().__init__("the model computes nothing that could be compiled.")
        self.output = output


def capture_call(call: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """Call the model until its compiled graph, which does not run; returns the graph and its arguments.

    Raises:
        NothingCompiled: the call ran no compiled graph.
    """
    _local.capturing = True
    try:
        output = call()
    except StopAtForward as captured:
        return captured.graph, captured.arguments
    finally:
        _local.capturing = False
    raise NothingCompiled(output)


class return_results:
    """Context manager in which the next compiled forward of this thread returns given results.

    Args:
        results: results of the compiled forward.
        check: called with the compiled graph that is to return them, and its arguments.
    """

    def __init__(self, results: Sequence[Any], check: Callable[[Any, Sequence[Any]], None]) -> None:
        self._answer = list(results), check

    def __enter__(self) -> None:
        _local.answer = self._answer

    def __exit__(self, *exc: object) -> None:
        _local.answer = None


def pipelined(graph: Any, saved: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """The compiled forward of a pipelined graph.

    Args:
        graph: the graph, raised together with the arguments.
        saved: placeholders for the values that the forward saves, appended to the results.
    """

    def call(arguments: list[Any]) -> Any:
        if getattr(_local, "capturing", False):
            raise StopAtForward(graph, list(arguments))
        answer = getattr(_local, "answer", None)
        if answer is None:
            raise RuntimeError("a pipelined graph was called outside of its step.")
        _local.answer = None
        results, check = answer
        check(graph, arguments)
        arguments.clear()
        return (*results, *saved)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
