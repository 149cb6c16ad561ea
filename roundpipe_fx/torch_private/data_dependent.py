"""Frames that cannot be traced with numbers taken from tensors: they are traced again without.

With ``capture_scalar_outputs`` and ``capture_dynamic_output_shape_ops`` what a tensor says becomes a symbol of the
graph. Where Python needs to know it (``sizes[int(torch.rand(()) * 3)]``, a momentum that an operator takes as a plain
number) Dynamo raises an error; without the flags it breaks the graph there, and the program runs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torch._dynamo

__all__ = ["install_retries", "was_retried"]

_FEWER = (
    {"capture_scalar_outputs": False},
    {"capture_scalar_outputs": False, "capture_dynamic_output_shape_ops": False},
)
_retried: set[tuple[str, int]] = set()


def install_retries(active: Callable[[], bool]) -> None:
    """Let Dynamo trace a frame again where it fails for want of data. Nothing of the frame has run by then.

    Args:
        active: whether what this thread traces is ours.
    """
    from torch._dynamo.convert_frame import ConvertFrameAssert

    trace: Any = ConvertFrameAssert.__call__
    if hasattr(trace, "roundpipe_fx"):
        return

    def trace_with_fewer_symbols(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return trace(self, frame, *args, **kwargs)
        except Exception as error:
            if not active() or not _wants_data(error):
                raise
            failure = error
        for flags in _FEWER:
            try:
                with torch._dynamo.config.patch(flags):
                    made = trace(self, frame, *args, **kwargs)
            except Exception:
                continue
            _retried.add(_place(frame.f_code))
            return made
        raise failure

    trace_with_fewer_symbols.roundpipe_fx = True  # type: ignore[attr-defined]
    ConvertFrameAssert.__call__ = trace_with_fewer_symbols  # type: ignore[method-assign]


def was_retried(file: str | None, line: int | None) -> bool:
    """Whether a function that begins at a line failed to be traced, and then was."""
    return (file, line) in _retried


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_filename, code.co_firstlineno


def _wants_data(error: BaseException) -> bool:
    """Whether somebody asked for a number that is not known while tracing."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
    found: BaseException | None = error
    while found is not None:
        inner = getattr(found, "inner_exception", None)
        if isinstance(found, kinds) or isinstance(inner, kinds) or "data-dependent expression" in str(found):
            return True
        found = found.__cause__ or found.__context__
    return False
