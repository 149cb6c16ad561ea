"""Modules whose forward is checkpointed: fairscale's ``checkpoint_wrapper``.

The module gets a generated subclass of its class, as with FSDP2's ``fully_shard``, so names, ``isinstance``, copies and
pickles work as before.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from roundpipe_fx.compat.checkpointing.checkpoint import checkpoint, is_recomputing
from roundpipe_fx.ir.recompute_marks import inputs_on_host
from roundpipe_fx.torch_private import RunningNorm

T = TypeVar("T", bound=nn.Module)


def checkpoint_wrapper(module: T, offload_to_cpu: bool = False) -> T:
    """Make calls of a module run through :func:`checkpoint`.

    As ``fairscale.nn.checkpoint_wrapper``: running statistics of batch norms inside are updated in the first pass only.

    ::

        model.layers[0] = roundpipe_fx.checkpoint_wrapper(model.layers[0], offload_to_cpu=True)

    Args:
        module: changed in place. Keyword arguments and inputs that are not tensors are accepted too.
        offload_to_cpu: keep its inputs in host memory from the forward to the backward. In a model compiled with
            roundpipe_fx the plan decides what is saved; what is saved of these inputs goes to the host where values can
            (``forward_backward`` of a model on the CPU that GPUs train).

    Returns:
        ``module``.

    Raises:
        ValueError: ``forward`` is an attribute of the module itself, not of its class.
    """
    if "forward" in vars(module):
        raise ValueError(
            f"the forward of this {type(module).__name__} has been replaced, which checkpoint_wrapper would not see: "
            "wrap the module first, then replace its forward; or call roundpipe_fx.checkpoint where it is called."
        )
    base: Any = type(module)
    module.__class__ = _checkpointed(base, offload_to_cpu)
    return module


@functools.cache
def _checkpointed(base: Any, offload_to_cpu: bool) -> type[Any]:
    """A subclass whose calls are checkpointed."""

    original = base.forward

    @functools.wraps(original)
    def run(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not is_recomputing():
            return original(self, *args, **kwargs)
        with _running_statistics_kept(self):
            return original(self, *args, **kwargs)

    @functools.wraps(original)
    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not offload_to_cpu:
            return checkpoint(functools.partial(run, self), *args, **kwargs)
        if torch.compiler.is_compiling():
            with inputs_on_host():
                return checkpoint(functools.partial(run, self), *args, **kwargs)
        with save_on_cpu():  # the checkpoint saves nothing of what is inside
            return checkpoint(functools.partial(run, self), *args, **kwargs)

    def reduce(self: Any, protocol: int) -> Any:
        _, (_, *arguments), *state = base.__reduce_ex__(self, max(protocol, 2))
        return (_new, (base, offload_to_cpu, *arguments), *state)

    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    body = {**names, "forward": forward, "__reduce_ex__": reduce}
    return types.new_class(base.__name__, (base,), exec_body=lambda namespace: namespace.update(body))


def _new(base: Any, offload_to_cpu: bool, *arguments: Any) -> nn.Module:
    cls = _checkpointed(base, offload_to_cpu)
    return cls.__new__(cls, *arguments)


@contextlib.contextmanager
def _running_statistics_kept(module: nn.Module) -> Iterator[None]:
    """Context manager in which batch norms in training update copies of their running statistics."""
    norms = [norm for norm in module.modules() if isinstance(norm, RunningNorm) and norm.training]
    kept = [(norm._buffers, dict(norm._buffers)) for norm in norms]
    for buffers, before in kept:
        buffers.update({name: value.clone() for name, value in before.items() if value is not None})
    try:
        yield
    finally:
        for buffers, before in kept:
            buffers.update(before)
