"""Frames that cannot be traced with data-dependent symbols are traced again without them.

With ``capture_scalar_outputs`` and ``capture_dynamic_output_shape_ops``, values read from tensors become symbols of the
graph. Where Python needs such a value (``sizes[int(torch.rand(()) * 3)]``, a momentum that an operator takes as a plain
number), Dynamo raises an error; without the flags it breaks the graph there, and the program runs.

Varying sizes of inputs become symbols too, but some of PyTorch's own derivatives (``affine_grid``, 2.13) accept plain
numbers only, and some operators (``fake_quantize_per_tensor_affine``) can be traced only with these; and operations on
varying numbers of rows are not carried out in tiles, which a budget may need. Such a frame is traced for the current
sizes, and recompiled for others.

A retry after which Dynamo would run the frame eagerly is an outcome too, where the first error would end the program:
the gradient of ``Embedding(sparse=True, padding_idx=0)`` can be traced neither with symbols nor without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
import torch._dynamo

__all__ = ["RefusedGraph", "install_retries", "is_graph_break", "was_retried"]

_FEWER = (
    {"capture_scalar_outputs": False},
    {"capture_scalar_outputs": False, "capture_dynamic_output_shape_ops": False},
)
_CURRENT_SIZES = ({"automatic_dynamic_shapes": False, "assume_static_by_default": True},)
_retried: set[tuple[str, int]] = set()


class RefusedGraph:
    """Of a backend's error: a refusal of a graph, which other ways to trace its frame do not lift.

    Attributes:
        wants_sizes: whether tracing it for the current sizes may: then that is tried.
    """

    wants_sizes: bool = False


def install_retries(active: Callable[[], bool]) -> None:
    """Make Dynamo retry a frame that it fails to trace for lack of data or plain sizes. Nothing of it has run by then.

    Args:
        active: whether the current thread traces one of our compilations.
    """
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.exc import Unsupported, UserError, UserErrorType
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    trace: Any = ConvertFrameAssert.__call__
    if hasattr(trace, "roundpipe_fx"):
        return

    def trace_with_fewer_symbols(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return trace(self, frame, *args, **kwargs)
        except Exception as error:
            if not active():
                raise
            attempts = _FEWER if _wants_data(error) else _CURRENT_SIZES if _wants_numbers(error) else ()
            if not attempts:
                raise
            failure = error
        soft: Exception | None = None
        for flags in attempts:
            try:
                with torch._dynamo.config.patch(flags):
                    traced = trace(self, frame, *args, **kwargs)
            except Exception as again:
                # A budget that the current sizes do not allow is what the user needs to know of.
                if any(isinstance(cause, RefusedGraph) for cause in _causes(again)):
                    raise
                if isinstance(again, (Unsupported, UserError)):
                    soft = soft or again
                continue
            _retried.add(_location(frame.f_code))
            return traced
        if soft is not None and not isinstance(failure, (Unsupported, UserError)):
            raise soft from failure  # the frame runs eagerly, unless it must be one graph
        if isinstance(failure, GuardOnDataDependentSymNode):  # as Dynamo has it for most code that reads a number
            raise UserError(UserErrorType.ANTI_PATTERN, str(failure)) from failure
        raise failure

    trace_with_fewer_symbols.roundpipe_fx = True  # type: ignore[attr-defined]
    ConvertFrameAssert.__call__ = trace_with_fewer_symbols  # type: ignore[method-assign]


def was_retried(file: str | None, line: int | None) -> bool:
    """Return whether the function that begins at a line was traced in a retry."""
    return (file, line) in _retried


def is_graph_break(error: BaseException) -> bool:
    """Return whether an error says that a function cannot be traced as one graph."""
    from torch._dynamo.exc import Unsupported, UserError

    return isinstance(error, (Unsupported, UserError)) or _wants_data(error)


def _location(code: CodeType) -> tuple[str, int]:
    return code.co_filename, code.co_firstlineno


def _wants_data(error: BaseException) -> bool:
    """Return whether an error means that a value was read that is not known while tracing."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
    return any(isinstance(cause, kinds) or "data-dependent expression" in str(cause) for cause in _causes(error))


_WANTS_NUMBERS = (
    "expected to contain only concrete integers",
    "Cannot call sizes() on tensor with symbolic",
    "Operator does not support running with fake tensors",
)
"""Messages of PyTorch where it reads sizes of a tensor whose sizes are symbolic: in C++, and for an operator without a
fake kernel, which is run on real tensors to find its results' shapes."""


def _wants_numbers(error: BaseException) -> bool:
    causes = list(_causes(error))
    is_requested = any(isinstance(cause, RefusedGraph) and cause.wants_sizes for cause in causes)
    return is_requested or any(text in str(cause) for cause in causes for text in _WANTS_NUMBERS)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        inner = getattr(cause, "inner_exception", None)
        if inner is not None:
            yield inner
        cause = cause.__cause__ or cause.__context__
