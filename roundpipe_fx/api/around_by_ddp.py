"""``forward_backward`` of a model that DistributedDataParallel wraps: a step that goes through DDP.

DDP averages the gradients of a backward whose forward went through it, and ``ddp.module.forward_backward`` bypasses
it. A module does not know its parents, so the parent is recorded when DDP registers it. A step then calls DDP, in which
the model runs the whole step instead of its forward, and the backward of the returned loss delivers the gradients.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_around: weakref.WeakKeyDictionary[Any, weakref.ref[DistributedDataParallel]] = weakref.WeakKeyDictionary()
"""The DDP that is around a compiled model, by the model's state."""


@functools.cache
def note_data_parallel() -> None:
    """From now on note which compiled models DDP is given; it refuses those of pipelines over processes."""
    register_module_module_registration_hook(_note)


def _note(parent: nn.Module, _name: str, child: nn.Module | None) -> None:
    if isinstance(parent, DistributedDataParallel) and child is not None:
        for module in child.modules():
            state = getattr(type(module), "_state_of_roundpipe_fx", None)
            if state is not None:
                state.__get__(module).check_replicable()
                _around[state.__get__(module)] = weakref.ref(parent)


def find_outer_ddp(model: nn.Module, state: Any) -> DistributedDataParallel | None:
    """Find the DDP through which a step of a compiled model must go; ``None``: there is none.

    Args:
        state: what it has beside the model.

    Raises:
        RuntimeError: the model is a part of what DDP wraps, and DDP is to average gradients; or it has hooks itself.
    """
    noted = _around.get(state)
    parallel = noted() if noted is not None else None
    if parallel is None or not torch.distributed.is_initialized():
        return None
    if parallel.module is model:
        if any(vars(model)[name] for name in _HOOKS):
            raise RuntimeError(
                "forward_backward of a model with hooks, inside DistributedDataParallel: the model is called for the "
                "batch and for each microbatch, and its hooks would run for both. Register them on a submodule."
            )
        return parallel
    if not parallel.require_backward_grad_sync:
        return None
    raise RuntimeError(
        f"forward_backward runs a step past the DistributedDataParallel around {type(parallel.module).__name__}, of "
        "which this model is a part, so gradients would not be averaged. Give the compiled model itself to "
        "DistributedDataParallel, or call the DistributedDataParallel and loss.backward(); inside ddp.no_sync() "
        "forward_backward adds to the gradients of this process."
    )


def refuse_inner_ddp(model: nn.Module) -> None:
    """Check that a model to be pipelined has no DDP in it.

    Raises:
        ValueError: it has.
    """
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            where = f"{name!r} is" if name else "the model is"
            raise ValueError(
                f"num_microbatches and devices require a model without DistributedDataParallel inside, but {where} "
                "one. Compile the model that it wraps, then wrap the result: "
                "DistributedDataParallel(roundpipe_fx.compile(model, num_microbatches=…))."
            )
