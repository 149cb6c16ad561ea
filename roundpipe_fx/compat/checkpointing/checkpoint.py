"""Checkpointed functions: ``torch.utils.checkpoint``, extended by functions that say which pass is running.

PyTorch's own non-reentrant checkpoint does the work. This module adds a record of passes
(:mod:`roundpipe_fx.compat.checkpointing.layer_pass`), which the functions of torchgpipe and fairscale
(``is_checkpointing``, ``is_recomputing``) and of RoundPipe (``doing_recompute``) read.

In a model compiled with roundpipe_fx none of this runs: the calls become recompute regions of the graph, and the
functions return while tracing what they return in a first pass.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from roundpipe_fx import torch_private
from roundpipe_fx.compat.checkpointing.layer_pass import Layer, current_pass, enter_layer, running

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Run a function whose intermediate values are not saved for the backward but recomputed there.

    Equivalent to :func:`torch.utils.checkpoint.checkpoint` with ``use_reentrant=False``, which it calls: keyword
    arguments, nested structures, parameters that require gradients with inputs that do not, ``torch.autograd.grad``,
    ``backward(inputs=…)`` and several backwards work, random numbers and autocast are reproduced exactly, and the
    states of the generators do not change. Inside, :func:`is_checkpointing`, :func:`is_recomputing`,
    :func:`roundpipe_fx.save_for_recompute` and :func:`roundpipe_fx.doing_recompute` work.

    In a model compiled with roundpipe_fx the call is a recompute region: values that are computed inside and read only
    there are not saved, except the results of host synchronizations, values passed to ``save_for_recompute`` and those
    that a selective policy saves.

    Args:
        function: called as ``function(*args, **kwargs)``, once now and once more for each backward.
        use_reentrant: accepted for compatibility; the non-reentrant form is always used.
        preserve_rng_state: whether recomputation draws the same random numbers. Compiled, ``False`` means that no
            generator state is saved: random numbers are saved instead, so gradients are correct all the same.
        context_fn: as in PyTorch, for selective checkpointing
            (``torch.utils.checkpoint.create_selective_checkpoint_contexts``).
        determinism_check: ``"default"`` compares shapes, dtypes and devices of recomputed tensors; ``"none"`` does not.
        debug: record the operations of both passes for the error message. Compiled it does nothing.
        early_stop: stop recomputing once all needed values are known.

    Returns:
        what ``function`` returns.

    Raises:
        torch.utils.checkpoint.CheckpointError: in the backward, when recomputation differs from the first pass.
        ValueError: an option has an unknown value.
    """
    # Only what differs from the default is passed, so that Dynamo traces a plain call in most cases.
    options: dict[str, Any] = {}
    if not preserve_rng_state:
        options["preserve_rng_state"] = False
    if context_fn is not noop_context_fn:
        options["context_fn"] = context_fn
    if determinism_check != "default":
        options["determinism_check"] = determinism_check
    if debug:
        options["debug"] = True
    if not early_stop:
        options["early_stop"] = False
    # Tracing: Dynamo knows PyTorch's function, and would break the graph at the record of passes below.
    if torch.compiler.is_compiling():
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    if use_reentrant:
        warnings.warn(
            "roundpipe_fx.checkpoint is always non-reentrant; use_reentrant=True has no effect. Leave it out.",
            stacklevel=2,
        )
    # Without gradients nothing is recomputed, so there is no second pass to tell from the first.
    if not torch.is_grad_enabled():
        return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    run = functools.partial(_run, function, enter_layer(_name(function)))
    return torch_checkpoint(run, *args, use_reentrant=False, **options, **kwargs)


def _run(function: Callable[..., Any], layer: Layer, /, *args: Any, **kwargs: Any) -> Any:
    with running(layer):
        return function(*args, **kwargs)


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
) -> Any:
    """Run a chain of functions in segments, all but the last of which are checkpointed.

    As :func:`torch.utils.checkpoint.checkpoint_sequential` with ``use_reentrant=False``.

    Args:
        functions: an ``nn.Sequential`` or a list of functions, each called with the result of the one before.
        segments: how many segments to divide them into.
        input: of the first one.
        use_reentrant: accepted for compatibility; the non-reentrant form is always used.

    Returns:
        what the last function returns.

    Raises:
        ValueError: ``segments`` is not between 1 and the number of functions.
    """
    chain = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if not 1 <= segments <= len(chain):
        raise ValueError(f"segments={segments}: it must be between 1 and the number of functions, {len(chain)}.")
    size = len(chain) // segments
    # As PyTorch does: all segments but the last are checkpointed, since the last one's backward follows at once.
    for start in range(0, size * (segments - 1), size):
        run = functools.partial(_run_chain, chain[start : start + size])
        input = checkpoint(run, input, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    return _run_chain(chain[size * (segments - 1) :], input)


def _run_chain(functions: Sequence[Callable[..., Any]], value: Any) -> Any:
    for function in functions:
        value = function(value)
    return value


def is_checkpointing() -> bool:
    """Return whether this thread is in the first pass of a checkpointed function.

    Compiled: whether the place is inside a checkpointed function.

    Returns:
        ``True`` in the first pass, else ``False``.
    """
    if torch.compiler.is_compiling():
        return torch_private.tracing_inside_checkpoint()
    running_pass = current_pass()
    return running_pass is not None and not running_pass.recomputing


def is_recomputing() -> bool:
    """Return whether this thread is in the recomputation of a checkpointed function. ``False`` in a compiled model.

    Returns:
        ``True`` in the recomputation, else ``False``.
    """
    if torch.compiler.is_compiling():
        return False
    running_pass = current_pass()
    return running_pass is not None and running_pass.recomputing


def _name(function: Callable[..., Any]) -> str:
    """A layer's name for people."""
    if isinstance(function, functools.partial):
        if function.func is _run_chain:
            return f"a segment of {len(function.args[0])} functions that begins with {_name(function.args[0][0])}"
        return _name(function.func)
    module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if isinstance(module, nn.Module):
        method = "" if module is function else f".{getattr(function, '__name__', '')}"
        inside = ", ".join(f"{name}: {type(child).__name__}" for name, child in list(module.named_children())[:3])
        return f"{type(module).__name__}{method}({inside})"
    return getattr(function, "__qualname__", repr(function))
