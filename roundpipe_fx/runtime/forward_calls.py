"""Requests of the compiled module to the forward programs below it: not to run, or to record their outputs.

Between the compiled module and a forward program are the runtimes of Dynamo and AOTAutograd, which pass nothing
through; so requests are kept in thread-local state.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundpipe_fx.runtime.stage_compiler import Boxed

__all__ = ["TraceOnly", "observed", "outputs_of_programs", "trace_only"]


_local = threading.local()


class TraceOnly(BaseException):
    """Raised instead of running a forward program inside :class:`trace_only`."""


class trace_only:
    """Context manager in which compiled functions of this thread are compiled but not run.

    They raise :class:`TraceOnly` instead.
    """

    def __enter__(self) -> None:
        _local.trace_only = True

    def __exit__(self, *exc: object) -> None:
        _local.trace_only = False


class outputs_of_programs:
    """Context manager that records the outputs of forward programs that this thread runs, by identity.

    ``output in noted`` tells whether a tensor is itself an output of a compiled program.
    """

    def __enter__(self) -> outputs_of_programs:
        self._outer = getattr(_local, "outputs", None)
        self._noted: dict[int, weakref.ref[Any]] = {}
        _local.outputs = self._noted
        return self

    def __exit__(self, *exc: object) -> None:
        _local.outputs = self._outer

    def __len__(self) -> int:
        return len(self._noted)

    def __contains__(self, output: object) -> bool:
        reference = self._noted.get(id(output))
        return reference is not None and reference() is output


def observed(run: Boxed, noted_outputs: int = 0, see: Callable[[Sequence[Any]], None] | None = None) -> Boxed:
    """Wrap a forward program so that it respects :class:`trace_only` and :class:`outputs_of_programs`.

    Args:
        run: the program.
        noted_outputs: number of its first results that may be recorded.
        see: called with its results.
    """

    def call(arguments: list[Any]) -> tuple[Any, ...]:
        if getattr(_local, "trace_only", False):
            raise TraceOnly
        results = run(arguments)
        if see is not None:
            see(results)
        noted = getattr(_local, "outputs", None)
        if noted is not None and noted_outputs:
            noted.update((id(v), weakref.ref(v)) for v in results[:noted_outputs] if isinstance(v, torch.Tensor))
        return results

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
