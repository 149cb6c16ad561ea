"""What a compiled module may ask of the compiled forwards below it, and what these may answer."""

from __future__ import annotations

import ast
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from roundpipe_fx.runtime.bridge import (
    NothingCompiled,
    StopAtForward,
    TraceOnly,
    capture_call,
    make_pipelined_forward,
    respect_trace_only,
    return_results,
    trace_only,
)

PACKAGE = Path(__file__).parent.parent.parent / "roundpipe_fx"


def _double(arguments: list[Any]) -> tuple[Any, ...]:
    return tuple(2 * value for value in arguments)


def test_what_is_only_traced_does_not_run() -> None:
    forward = respect_trace_only(_double)
    with trace_only():
        with pytest.raises(TraceOnly):
            forward([1])
        ran: list[Any] = []
        thread = threading.Thread(target=lambda: ran.append(forward([1])))
        thread.start()
        thread.join()
    assert ran == [(2,)] and forward([2]) == (4,)


def test_a_call_is_captured_and_then_returns_what_was_computed_elsewhere() -> None:
    forward = make_pipelined_forward("graph", ["saved"])
    assert capture_call(lambda: forward([1, 2])) == ("graph", [1, 2])
    seen: list[Any] = []
    with return_results((3,), lambda graph, arguments: seen.append((graph, list(arguments)))):
        assert forward([1, 2]) == (3, "saved")
        with pytest.raises(RuntimeError, match="called outside of its step"):  # results are returned once
            forward([1, 2])
    assert seen == [("graph", [1, 2])]


def test_a_call_without_a_graph_returns_its_output() -> None:
    with pytest.raises(NothingCompiled) as raised:
        capture_call(lambda: "output")
    assert raised.value.output == "output"
    forward = make_pipelined_forward("graph", [])
    with pytest.raises(RuntimeError, match="called outside of its step"):  # it is captured no longer
        forward([1])


def test_a_handler_of_the_model_does_not_catch_what_travels_up() -> None:
    forward = make_pipelined_forward("graph", [])

    def call() -> Any:
        with contextlib.suppress(Exception):
            return forward([1])

    assert capture_call(call) == ("graph", [1])


def test_only_the_bridge_has_such_exceptions() -> None:
    found = {
        node.name
        for path in PACKAGE.glob("**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "BaseException" for base in node.bases)
    }
    assert found == {StopAtForward.__name__, TraceOnly.__name__}
