"""Pipelined calls: how a step gets at what Dynamo and AOTAutograd prepare for one microbatch, and hands back results.

A microbatch is called twice. The first call is *taken*: guards are checked, inputs are flattened, the compiled
forward gets its arguments and, instead of running, raises them to whoever takes them. When all microbatches have run,
the second call is *answered*: the compiled forward returns what was computed elsewhere, so that AOTAutograd updates
buffers and Dynamo puts the model's own outputs together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["NothingCompiled", "StopAtForward", "capture_call", "pipelined", "return_results"]

_local = threading.local()


class StopAtForward(BaseException):
    """Carries a compiled forward's arguments to whoever takes them."""

    def __init__(self, graph: Any, arguments: list[Any]) -> None:
        super().__init__()
        self.graph = graph
        self.arguments = arguments


class NothingCompiled(RuntimeError):
    """A call ran no compiled graph: it returned what it was given.

    Attributes:
        output: what it returned.
    """

    def __init__(self, output: Any) -> None:
        super().__init__("the model computes nothing that could be compiled.")
        self.output = output


def capture_call(call: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """The compiled graph behind a call, and its arguments; nothing runs.

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
    """While entered, the next compiled forward of this thread returns these results.

    Args:
        results: of the compiled forward.
        check: gets the compiled graph that is to return them, and its arguments.
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
        graph: what is raised with the arguments.
        saved: stand-ins for what the forward keeps, appended to each answer.
    """

    def call(arguments: list[Any]) -> Any:
        if getattr(_local, "capturing", False):
            raise StopAtForward(graph, list(arguments))
        answer = getattr(_local, "answer", None)
        if answer is None:
            raise RuntimeError("a pipelined graph was called from outside of its step.")
        _local.answer = None
        results, check = answer
        check(graph, arguments)
        arguments.clear()
        return (*results, *saved)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
