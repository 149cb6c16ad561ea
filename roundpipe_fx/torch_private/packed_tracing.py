"""Packed sequences: makes Dynamo trace functions on them, which it skips otherwise."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from roundpipe_fx.torch_private.flags import is_ours, patching

__all__ = ["trace_packed_sequences"]


def trace_packed_sequences(
    *,
    pack: Callable[..., Any],
    pack_by_numbers: Callable[..., Any],
    pad: Callable[..., Any],
    forward: Callable[..., Any],
) -> None:
    """Patch Dynamo so that it traces other functions on packed sequences in our compilations.

    Args:
        pack: traceable function that is called in place of ``pack_padded_sequence``.
        pack_by_numbers: the same, where the lengths are numbers that were read from a tensor.
        pad: traceable function that is called in place of ``pad_packed_sequence``.
        forward: instead of that of ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU``, on a packed sequence.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable

    call_skipped: Any = SkipFunctionVariable.call_function
    traced_forward: Any = forward
    functions: dict[Any, Any] = {rnn.pack_padded_sequence: pack, rnn.pad_packed_sequence: pad}
    inline: Any = InstructionTranslatorBase.inline_user_function_return

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        traced: Any = functions.get(self.value) if is_ours() and isinstance(self.value, FunctionType) else None
        if traced is None:
            return call_skipped(self, tx, args, kwargs)
        if traced is pack and _are_read_from_tensors(_argument(1, "lengths", args, kwargs)):
            traced = pack_by_numbers
        return UserFunctionVariable(traced).call_function(tx, args, kwargs)

    def inline_user_function_return(
        self: Any, fn: Any, args: Any, kwargs: Any, *more_arguments: Any, **options: Any
    ) -> Any:
        if is_ours() and getattr(fn, "fn", None) in _FORWARDS and _is_packed(_argument(1, "input", args, kwargs)):
            fn = UserFunctionVariable(traced_forward)
        return inline(self, fn, args, kwargs, *more_arguments, **options)

    inline_user_function_return.roundpipe_fx = True  # type: ignore[attr-defined]
    with patching:
        if not hasattr(InstructionTranslatorBase.inline_user_function_return, "roundpipe_fx"):
            SkipFunctionVariable.call_function = call_function  # type: ignore[method-assign]
            InstructionTranslatorBase.inline_user_function_return = inline_user_function_return  # type: ignore[method-assign]


_FORWARDS = (nn.RNN.forward, nn.LSTM.forward, nn.GRU.forward)


def _argument(position: int, name: str, args: Any, kwargs: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _is_packed(variable: Any) -> bool:
    """Return whether a variable of Dynamo is a packed sequence."""
    try:
        return variable is not None and issubclass(variable.python_type(), PackedSequence)
    except NotImplementedError:
        return False


def _are_read_from_tensors(variable: Any) -> bool:
    """Return whether a variable of Dynamo is a list of numbers read from tensors, which are not known while tracing."""
    items = getattr(variable.realize(), "items", ()) if variable is not None else ()
    numbers = [getattr(item.realize(), "sym_num", None) for item in items] if isinstance(items, list | tuple) else []
    return any(number is not None and free_unbacked_symbols(number) for number in numbers)
