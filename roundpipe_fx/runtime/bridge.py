"""The bridge from a compiled module to the compiled forwards below it, past Dynamo and AOTAutograd.

Between the two are runtimes that pass nothing through: no argument down, no result but the model's outputs up. So a
request for the next call is put into this thread's :class:`_Requests`, the compiled forward reads it, and what cannot
be a result travels up as an exception that these runtimes do not catch::

    compiled module                      Dynamo, AOTAutograd                   compiled forward
          │                                       │                                   │
          │  trace_only                           │                                   │
          ├── model(batch) ──────────────────────▶├── compiles it, and calls it ─────▶┤
          │◀──────────────────────────────────────┼──────────────── raises TraceOnly ─┤
          │                                       │                                   │
          │  a step in microbatches: each calls the model twice                       │
          │  capture_call                         │                                   │
          ├── model(microbatch) ─────────────────▶├── guards, flattens ──────────────▶┤
          │◀──────────────────────────────────────┼─ raises StopAtForward(arguments) ─┤
          ├─ runs the stages of all microbatches  │                                   │
          │  return_results                       │                                   │
          ├── model(microbatch) ─────────────────▶├── guards, flattens ──────────────▶┤ checks that nothing changed
          │◀── outputs, as the model has them ────┤◀── results, saved values ─────────┤
          │                                       ├─ updates buffers                  │

The two exceptions are no ``Exception``, so that no handler of the model's own catches them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from roundpipe_fx.runtime.stage_compiler import Boxed

Check = Callable[[Any, Sequence[Any]], None]
"""Called with the compiled graph that is to return results, and with its arguments."""


class _Requests(threading.local):
    """Requests to the compiled forwards that this thread calls.

    Attributes:
        capture: to raise their arguments.
        results: to return these results, once, after the check; ``None``: not to.
    """

    trace_only: bool = False
    capture: bool = False
    results: tuple[Sequence[Any], Check] | None = None


_requests = _Requests()


class TraceOnly(BaseException):
    """Raised instead of running a forward program inside :class:`trace_only`."""


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


class trace_only:
    """Context manager in which compiled functions of this thread are compiled but not run.

    They raise :class:`TraceOnly` instead.
    """

    def __enter__(self) -> None:
        _requests.trace_only = True

    def __exit__(self, *exc: object) -> None:
        _requests.trace_only = False


def capture_call(call: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """Call the model until its compiled graph, which does not run.

    Returns:
        the graph, and its arguments.

    Raises:
        NothingCompiled: the call ran no compiled graph.
    """
    _requests.capture = True
    try:
        output = call()
    except StopAtForward as captured:
        return captured.graph, captured.arguments
    finally:
        _requests.capture = False
    # Nothing was raised: no compiled forward ran in this call.
    raise NothingCompiled(output)


class return_results:
    """Context manager in which the next compiled forward of this thread returns results that were computed elsewhere.

    Args:
        results: of the compiled forward.
        check: called before they are returned.
    """

    def __init__(self, results: Sequence[Any], check: Check) -> None:
        self._request = list(results), check

    def __enter__(self) -> None:
        _requests.results = self._request

    def __exit__(self, *exc: object) -> None:
        _requests.results = None


def respect_trace_only(run: Boxed, see: Callable[[Sequence[Any]], None] | None = None) -> Boxed:
    """Wrap a forward program so that it respects :class:`trace_only`.

    Args:
        see: called with its results.
    """

    def call(arguments: list[Any]) -> tuple[Any, ...]:
        if _requests.trace_only:
            raise TraceOnly
        results = run(arguments)
        if see is not None:
            see(results)
        return results

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def make_pipelined_forward(graph: Any, saved: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """The compiled forward of a pipelined graph, which never runs itself: see :func:`capture_call` and
    :class:`return_results`.

    Args:
        graph: the graph, raised together with the arguments.
        saved: placeholders for the values that the forward saves, appended to the results.
    """

    def call(arguments: list[Any]) -> Any:
        if _requests.capture:
            raise StopAtForward(graph, list(arguments))
        if _requests.results is None:
            raise RuntimeError("a pipelined graph was called outside of its step.")
        results, check = _requests.results
        # Once: a second call within the step is not this request's.
        _requests.results = None
        check(graph, arguments)
        arguments.clear()
        return (*results, *saved)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
