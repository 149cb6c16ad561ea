"""Opaque backwards: makes custom operators traceable whose registered backward cannot be traced.

A backward that was registered from Python (``torch.library.register_autograd``) is traced into the joint graph. Some
backwards cannot be traced, because they read data on the host (``.tolist()``), as Hugging Face's fallback for grouped
matrix products does. While a graph is captured, such a backward is replaced by an opaque operator that runs it. Its
fake implementation is trivial, because gradients have the shapes of the operator's inputs::

    in the graph         opaque_backward([saved tensors, incoming gradients], [sizes of the gradients], key)
    next to the graph    key: the function, its constant arguments as a template, the layouts of the gradients

Equal keys mean equal constants, compared by value, since stages with equal fingerprints are compiled once. An entry
lives as long as a stage that refers to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roundpipe_fx import torch_private
from roundpipe_fx.frontend.call_template import empty_template, fill_template, is_same_template
from roundpipe_fx.torch_private import tree_flatten, tree_unflatten


@contextlib.contextmanager
def opaque_backwards(module: fx.GraphModule) -> Iterator[list[OpaqueCall]]:
    """Context manager in which custom operators of a graph get an opaque backward if theirs cannot be traced.

    Yields:
        the opaque calls, which have to be kept alive until their stages are compiled.
    """
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    definitions = torch_private.registered_backwards(list(dict.fromkeys(targets)))
    originals = [(definition._backward_fn, definition._setup_context_fn) for definition in definitions]
    calls: list[OpaqueCall] = []
    # The registered functions are exchanged for the time of the capture, and restored whatever happens.
    for definition, (backward, setup_context) in zip(definitions, originals, strict=True):
        definition._backward_fn = _wrap_backward(definition._qualname, backward, calls)
        definition._setup_context_fn = _record_inputs(setup_context)
    try:
        yield calls
    finally:
        for definition, (backward, setup_context) in zip(definitions, originals, strict=True):
            definition._backward_fn = backward
            definition._setup_context_fn = setup_context


@dataclass(frozen=True)
class _ValueSpec:
    """The constant properties of an input.

    Attributes:
        order: its dimensions, from the outermost in memory to the innermost; its gradient has the same order.
    """

    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class OpaqueCall:
    """The constants of a call of the opaque operator.

    Attributes:
        needs: which inputs of the operator need a gradient, as in the context.
        is_needed: the same for tensors only, flattened.
        template: saved tensors, attributes of the context and incoming gradients, with slots for tensors and sizes
            (:mod:`roundpipe_fx.frontend.call_template`).
        inputs: properties of each input that needs a gradient.
    """

    function: Callable[..., Any]
    needs: Any
    is_needed: tuple[bool, ...]
    template: Any
    inputs: tuple[_ValueSpec, ...]


_calls: weakref.WeakValueDictionary[str, OpaqueCall] = weakref.WeakValueDictionary()


def calls_in(graph: fx.Graph) -> list[OpaqueCall]:
    """The opaque calls in a stage module's graph, which have to be kept alive as long as it runs."""
    nodes = graph.find_nodes(op="call_function", target=torch.ops.roundpipe_fx.opaque_backward.default)
    return [_calls[str(node.args[-1])] for node in nodes]


class _Context:
    """Stands for autograd's context in a registered backward: saved tensors and attributes."""

    def __init__(self, saved: Sequence[Any], needs_input_grad: Any, attributes: dict[str, Any]) -> None:
        self.saved_tensors = tuple(saved)
        self.needs_input_grad = needs_input_grad
        for name, value in attributes.items():
            setattr(self, name, value)


_recorded_inputs: weakref.WeakKeyDictionary[Any, tuple[list[Any], Any]] = weakref.WeakKeyDictionary()
"""By autograd context: shape and properties of each flattened input of the operator, and their structure."""
_NOT_THE_USERS = ("needs_input_grad", "_pt_metadata")
"""Attributes of a context that are not set by the operator's ``setup_context``."""


def _record_inputs(setup_context: Callable[..., Any] | None) -> Callable[..., Any]:
    """Wrap ``setup_context`` so that shapes and layouts of the operator's inputs are recorded for the context."""

    def record(ctx: Any, inputs: tuple[Any, ...], output: Any, **keywords: Any) -> Any:
        # What the backward needs to know of its inputs is noted in the forward, when the inputs themselves are known.
        leaves, structure = tree_flatten(inputs)
        kinds = [
            (tuple(value.shape), _ValueSpec(_order(value), value.dtype, value.device))
            if isinstance(value, torch.Tensor)
            else None
            for value in leaves
        ]
        _recorded_inputs[ctx] = kinds, structure
        return setup_context(ctx=ctx, inputs=inputs, output=output, **keywords) if setup_context else None

    return record


def _order(value: torch.Tensor) -> tuple[int, ...]:
    strides = [torch_private.size_hint(stride) for stride in value.stride()]
    return tuple(sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim)))


def _wrap_backward(name: str, original: Callable[..., Any], calls: list[OpaqueCall]) -> Callable[..., Any]:
    def backward(context: Any, *gradients: Any) -> Any:
        # A backward that can be traced is traced: an opaque one cannot be cut, fused or recomputed in part.
        if torch_private.traces(lambda: original(context, *gradients), gradients):
            return original(context, *gradients)
        return _call_opaque(name, original, context, gradients, calls)

    return backward


def _call_opaque(
    name: str, original: Callable[..., Any], context: Any, gradients: tuple[Any, ...], calls: list[OpaqueCall]
) -> Any:
    kinds, structure = _recorded_inputs[context]
    attributes = {key: value for key, value in vars(context).items() if key not in _NOT_THE_USERS}
    flat_needs, _ = tree_flatten(context.needs_input_grad)
    is_needed = tuple(bool(need) and kind is not None for need, kind in zip(flat_needs, kinds, strict=True))
    needed = [kind for needs, kind in zip(is_needed, kinds, strict=True) if needs]
    tensors: list[torch.Tensor] = []
    # Sizes are arguments too, so that symbolic ones stay symbolic.
    sizes = [size for shape, _ in needed for size in shape]
    template = empty_template((tuple(context.saved_tensors), attributes, gradients), tensors, sizes)
    call = OpaqueCall(original, context.needs_input_grad, is_needed, template, tuple(kind for _, kind in needed))
    key, call = _register(name, call)
    calls.append(call)
    results = iter(_opaque_backward(tensors, sizes, key))
    return tuple(tree_unflatten([next(results) if needs else None for needs in is_needed], structure))


def _register(name: str, call: OpaqueCall) -> tuple[str, OpaqueCall]:
    """The key of a call, and the call stored under it; both are the same for calls with equal constants."""
    digest = hashlib.sha256(repr((call.needs, call.template, call.inputs)).encode()).hexdigest()[:8]
    # A digest may be shared by different calls: they are compared by value, and numbered where they differ.
    for number in itertools.count():
        key = f"{name}/{digest}" + (f".{number}" if number else "")
        registered = _calls.get(key)
        if registered is None:
            _calls[key] = call
            return key, call
        alike = (registered.function, registered.is_needed, registered.inputs) == (
            call.function,
            call.is_needed,
            call.inputs,
        )
        if alike and is_same_template((registered.needs, registered.template), (call.needs, call.template)):
            return key, registered
    raise AssertionError


@torch.library.custom_op("roundpipe_fx::opaque_backward", mutates_args=())
def _opaque_backward(tensors: Sequence[torch.Tensor], sizes: Sequence[int], key: str) -> list[torch.Tensor]:
    call = _calls[key]
    saved, attributes, gradients = fill_template(call.template, tensors, sizes)
    result = call.function(_Context(saved, call.needs, attributes), *gradients)
    results = _flatten_results(call, result if isinstance(result, (tuple, list)) else (result,))
    needed = [value for value, needs in zip(results, call.is_needed, strict=True) if needs]
    used_memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    gradients_of_inputs = []
    for value, kind, shape in zip(needed, call.inputs, _shapes(call, sizes), strict=True):
        gradient = _make_empty(kind, shape).zero_() if value is None else _as_gradient(value, kind, shape)
        if (
            gradient.untyped_storage().data_ptr() in used_memory
        ):  # results of an operator must not alias its operands or each other
            gradient = gradient.clone()
        used_memory.add(gradient.untyped_storage().data_ptr())
        gradients_of_inputs.append(gradient)
    return gradients_of_inputs


@_opaque_backward.register_fake
def _(tensors: Sequence[torch.Tensor], sizes: Sequence[int], key: str) -> list[torch.Tensor]:
    call = _calls[key]
    return [_make_empty(kind, shape) for kind, shape in zip(call.inputs, _shapes(call, sizes), strict=True)]


def _flatten_results(call: OpaqueCall, results: Sequence[Any]) -> list[Any]:
    """Gradients of the operator's inputs, flattened; ``None`` may stand for a whole list."""
    flat: list[Any] = []
    for need, result in zip(call.needs, results, strict=True):
        count = len(tree_flatten(need)[0])
        flat += [None] * count if result is None else tree_flatten(result)[0] if isinstance(need, list) else [result]
    return flat


def _as_gradient(value: torch.Tensor, kind: _ValueSpec, shape: Sequence[int]) -> torch.Tensor:
    """A gradient with the dtype, shape and layout of the input, as autograd would return it."""
    if tuple(value.shape) != tuple(shape):
        value = value.sum_to_size(shape)
    if value.dtype == kind.dtype and value.stride() == _make_empty(kind, shape, "meta").stride():
        return value
    return _make_empty(kind, shape).copy_(value)


def _shapes(call: OpaqueCall, sizes: Sequence[int]) -> list[Sequence[int]]:
    """Shapes of the gradients, which are the first sizes; the remaining ones belong to the template."""
    remaining = iter(sizes)
    return [[next(remaining) for _ in kind.order] for kind in call.inputs]


def _make_empty(kind: _ValueSpec, shape: Sequence[int], device: str | None = None) -> torch.Tensor:
    outer_first = torch.empty([shape[dim] for dim in kind.order], dtype=kind.dtype, device=device or kind.device)
    return outer_first.permute([kind.order.index(dim) for dim in range(len(shape))])
