"""Frames that cannot be traced with numbers taken from tensors: they are traced again without.

With ``capture_scalar_outputs`` and ``capture_dynamic_output_shape_ops`` what a tensor says becomes a symbol of the
graph. Where Python needs to know it (``sizes[int(torch.rand(()) * 3)]``, a momentum that an operator takes as a plain
number) Dynamo raises an error; without the flags it breaks the graph there, and the program runs.

Sizes of inputs that vary become symbols too, and some of PyTorch's own derivatives (``affine_grid``'s, 2.13) take plain
numbers only; some operators (``fake_quantize_per_tensor_affine``) can be traced with these only. Such a frame is traced
for the sizes at hand, and anew for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
import torch._dynamo

__all__ = ["install_retries", "was_retried"]

_FEWER = (
    {"capture_scalar_outputs": False},
    {"capture_scalar_outputs": False, "capture_dynamic_output_shape_ops": False},
)
_SIZES_AT_HAND = ({"automatic_dynamic_shapes": False},)
_retried: set[tuple[str, int]] = set()


def install_retries(active: Callable[[], bool]) -> None:
    """Let Dynamo trace a frame again where it fails for want of data or plain sizes. Nothing of it has run by then.

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
            if not active():
                raise
            attempts = _FEWER if _wants_data(error) else _SIZES_AT_HAND if _wants_numbers(error) else ()
            if not attempts:
                raise
            failure = error
        for flags in attempts:
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
    return any(isinstance(found, kinds) or "data-dependent expression" in str(found) for found in _causes(error))


_WANTS_NUMBERS = (
    "expected to contain only concrete integers",
    "Cannot call sizes() on tensor with symbolic",
    "Operator does not support running with fake tensors",
)
"""What PyTorch says where it asks for plain sizes of a tensor whose sizes are symbols: in C++, and of an operator
without a fake kernel, which is run on real tensors to see what it makes."""


def _wants_numbers(error: BaseException) -> bool:
    return any(text in str(found) for found in _causes(error) for text in _WANTS_NUMBERS)


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        inner = getattr(found, "inner_exception", None)
        if inner is not None:
            yield inner
        found = found.__cause__ or found.__context__
