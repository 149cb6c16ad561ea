"""What a caller may want of the forward programs that run below it: that they do not run, or to know their outputs.

Between the caller (the compiled module) and a forward program stand Dynamo's and AOTAutograd's runtimes, which pass
nothing through; so the wish is kept by thread.
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
    """Raised instead of running a forward program while :func:`trace_only` is in force."""


class trace_only:
    """While entered, compiled functions of this thread are compiled but not run: they raise :class:`TraceOnly`."""

    def __enter__(self) -> None:
        _local.trace_only = True

    def __exit__(self, *exc: object) -> None:
        _local.trace_only = False


class outputs_of_programs:
    """While entered, notes the outputs of forward programs that this thread runs, by identity.

    ``output in noted`` tells whether a tensor came from a compiled program as it is.
    """

    def __enter__(self) -> outputs_of_programs:
        self._outer = getattr(_local, "outputs", None)
        self._noted: dict[int, weakref.ref[Any]] = {}
        _local.outputs = self._noted
        return self

    def __exit__(self, *exc: object) -> None:
        _local.outputs = self._outer

    def __contains__(self, output: object) -> bool:
        reference = self._noted.get(id(output))
        return reference is not None and reference() is output


def observed(run: Boxed, noted_outputs: int = 0, see: Callable[[Sequence[Any]], None] | None = None) -> Boxed:
    """A forward program that heeds :class:`trace_only` and :class:`outputs_of_programs`.

    Args:
        run: the program.
        noted_outputs: how many of its first results may be noted.
        see: is shown its results.
    """

    def call(arguments: list[Any]) -> tuple[Any, ...]:
        if getattr(_local, "trace_only", False):
            raise TraceOnly
        results = run(arguments)
        if see is not None:
            see(results)
        noted = getattr(_local, "outputs", None)
        if noted is not None:
            noted.update({id(v): weakref.ref(v) for v in results[:noted_outputs] if isinstance(v, torch.Tensor)})
        return results

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
