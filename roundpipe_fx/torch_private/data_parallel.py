"""DistributedDataParallel: what it does before and after the forward of its module."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["active_bucket_bytes", "as_data_parallel", "bucket_bytes", "data_parallel_forward", "module_forward"]


def as_data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """The model, if its ``forward`` is DDP's own; ``None`` for others, subclasses with one of their own among them."""
    if not isinstance(model, DistributedDataParallel) or "forward" in vars(model):
        return None
    return model if type(model).forward is DistributedDataParallel.forward else None


def bucket_bytes(parallel: DistributedDataParallel) -> int:
    """Bytes of the buckets in which DDP averages gradients."""
    ignored = parallel.parameters_to_ignore
    trained = (
        parameter
        for name, parameter in parallel.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    )
    return sum(parameter.nbytes for parameter in trained)


def active_bucket_bytes() -> int:
    """Bytes of the buckets of the DDP whose forward is running; 0 if none is."""
    parallel = DistributedDataParallel._get_active_ddp_module()
    return bucket_bytes(parallel) if parallel is not None else 0


def module_forward(parallel: DistributedDataParallel) -> Callable[..., Any]:
    """A call of DDP's module, as a method of DDP: traced, modules have the names that they have in DDP."""
    return types.MethodType(_module_forward, parallel)


def _module_forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    return self.module(*args, **kwargs)


def data_parallel_forward(
    parallel: DistributedDataParallel, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """DDP's own forward with ``run`` in place of its module.

    Dynamo cannot trace the rest of it: it synchronizes buffers, moves inputs and prepares the reducer.
    """
    inputs, named = parallel._pre_forward(*args, **kwargs)
    return parallel._post_forward(run(*inputs, **named))
