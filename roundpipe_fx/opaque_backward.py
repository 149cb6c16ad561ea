"""Custom operators whose registered backward cannot be traced become traceable.

A backward that was registered from Python (``torch.library.register_autograd``) is traced into the joint graph. Some
cannot be: they read data on the host (``.tolist()``), as Hugging Face's fallback for grouped matrix products does.
While a graph is captured, such a backward is replaced by one opaque operator that runs it as it is. Its fake
implementation is trivial, because gradients have the shapes of the operator's inputs.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roundpipe_fx import torch_private

__all__ = ["opaque_backwards"]


@contextlib.contextmanager
def opaque_backwards(module: fx.GraphModule) -> Iterator[None]:
    """While entered, custom operators called in ``module`` whose backward cannot be traced get an opaque one."""
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    definitions = torch_private.registered_backwards(list(dict.fromkeys(targets)))
    originals = [(definition._backward_fn, definition._setup_context_fn) for definition in definitions]
    for definition, (backward, setup_context) in zip(definitions, originals, strict=True):
        definition._backward_fn = _traceable(definition._qualname, backward)
        definition._setup_context_fn = _remembering(setup_context)
    try:
        yield
    finally:
        for definition, (backward, setup_context) in zip(definitions, originals, strict=True):
            definition._backward_fn = backward
            definition._setup_context_fn = setup_context


@dataclass(frozen=True)
class _Kind:
    """What is constant about an input.

    Attributes:
        order: its dimensions, from the outermost in memory to the innermost; its gradient is laid out alike.
        dtype: its type.
        device: where it lies.
    """

    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Call:
    """What is constant about a call of the opaque operator; the operator's ``key`` names it.

    Attributes:
        function: the registered backward.
        needs: which inputs of the operator need a gradient.
        saved: how many tensors the context saved.
        names: attributes of the context that are tensors, in order.
        constants: its other attributes.
        inputs: each input of the operator that needs a gradient.
    """

    function: Callable[..., Any]
    needs: tuple[bool, ...]
    saved: int
    names: tuple[str, ...]
    constants: dict[str, Any]
    inputs: tuple[_Kind, ...]


_calls: dict[str, _Call] = {}


class _Context:
    """What a registered backward sees of autograd's context: saved tensors and the attributes that were set."""

    def __init__(self, saved: Sequence[Any], needs_input_grad: tuple[bool, ...], attributes: dict[str, Any]) -> None:
        self.saved_tensors = tuple(saved)
        self.needs_input_grad = needs_input_grad
        for name, value in attributes.items():
            setattr(self, name, value)


def _remembering(setup_context: Callable[..., Any] | None) -> Callable[..., Any]:
    """Let the context remember shapes and layouts of the operator's inputs, for the gradients'."""

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any, **keywords: Any) -> Any:
        ctx._roundpipe_inputs = [
            (tuple(value.shape), _Kind(_order(value), value.dtype, value.device))
            if isinstance(value, torch.Tensor)
            else None
            for value in inputs
        ]
        return setup_context(ctx=ctx, inputs=inputs, output=output, **keywords) if setup_context else None

    return remember


def _order(value: torch.Tensor) -> tuple[int, ...]:
    strides = [torch_private.size_hint(stride) for stride in value.stride()]
    return tuple(sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim)))


def _traceable(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(context: Any, *gradients: Any) -> Any:
        if torch_private.traces(lambda: original(context, *gradients), gradients):
            return original(context, *gradients)
        return _call_opaque(name, original, context, gradients)

    return backward


def _call_opaque(name: str, original: Callable[..., Any], context: Any, gradients: tuple[Any, ...]) -> Any:
    attributes = {key: value for key, value in vars(context).items() if not key.startswith("_")}
    tensors = {key: value for key, value in attributes.items() if isinstance(value, torch.Tensor)}
    inputs = context._roundpipe_inputs
    needs = tuple(need and kind is not None for need, kind in zip(context.needs_input_grad, inputs, strict=True))
    wanted = [kind for need, kind in zip(needs, inputs, strict=True) if need]
    call = _Call(
        original,
        tuple(context.needs_input_grad),
        len(context.saved_tensors),
        tuple(tensors),
        {key: value for key, value in attributes.items() if key not in tensors and key != "needs_input_grad"},
        tuple(kind for _, kind in wanted),
    )
    digest = hashlib.sha256(repr((call.needs, call.saved, call.names, call.constants, call.inputs)).encode())
    key = f"{name}/{digest.hexdigest()[:8]}"
    _calls[key] = call
    sizes = [size for shape, _ in wanted for size in shape]
    made = iter(_opaque_backward([*context.saved_tensors, *tensors.values(), *gradients], sizes, key))
    return tuple(next(made) if need else None for need in needs)


@torch.library.custom_op("roundpipe_fx::opaque_backward", mutates_args=())
def _opaque_backward(tensors: Sequence[torch.Tensor], sizes: Sequence[int], key: str) -> list[torch.Tensor]:
    call = _calls[key]
    middle = call.saved + len(call.names)
    attributes = {**call.constants, **dict(zip(call.names, tensors[call.saved : middle], strict=True))}
    result = call.function(_Context(tensors[: call.saved], call.needs, attributes), *tensors[middle:])
    results = result if isinstance(result, (tuple, list)) else (result,)
    wanted = [value for value, need in zip(results, call.needs, strict=True) if need]
    aliased = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    made = []
    for value, kind, shape in zip(wanted, call.inputs, _shapes(call, sizes), strict=True):
        if value is None:
            made.append(_empty(kind, shape).zero_())
        elif value.stride() != _empty(kind, shape, "meta").stride():
            made.append(_empty(kind, shape).copy_(value))
        else:
            made.append(value.clone() if value.untyped_storage().data_ptr() in aliased else value)
    return made


@_opaque_backward.register_fake
def _(tensors: Sequence[torch.Tensor], sizes: Sequence[int], key: str) -> list[torch.Tensor]:
    call = _calls[key]
    return [_empty(kind, shape) for kind, shape in zip(call.inputs, _shapes(call, sizes), strict=True)]


def _shapes(call: _Call, sizes: Sequence[int]) -> list[Sequence[int]]:
    remaining = iter(sizes)
    return [[next(remaining) for _ in kind.order] for kind in call.inputs]


def _empty(kind: _Kind, shape: Sequence[int], device: str | None = None) -> torch.Tensor:
    outer_first = torch.empty([shape[dim] for dim in kind.order], dtype=kind.dtype, device=device or kind.device)
    return outer_first.permute([kind.order.index(dim) for dim in range(len(shape))])
