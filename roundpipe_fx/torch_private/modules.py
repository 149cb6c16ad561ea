"""Modules and optimizers that PyTorch treats in its own way.

These are FSDP2 (``fully_shard``) and DistributedDataParallel, which allocate and communicate around the forward and
backward of what they wrap; normalization layers with running statistics; and what hooks or replaces the ``step`` of an
optimizer, which documented interfaces only write.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "AnyBatchNorm",
    "RunningNorm",
    "active_bucket_bytes",
    "as_data_parallel",
    "bucket_bytes",
    "data_parallel_forward",
    "gathered_bytes",
    "module_forward",
    "note_optimizer_step",
    "parts_sharded_alone",
    "step_is_watched",
]


def gathered_bytes(model: nn.Module) -> int:
    """An upper bound of what FSDP2 allocates at one time while a sharded model's forward and backward run, in bytes.

    FSDP2 gathers the parameters of a group into one buffer and copies them out of it, and copies gradients into
    another once the parameters are resharded. A group that is not resharded after its forward stays gathered until its
    backward. Of the others at most one is in use, while the next one is gathered and gradients of the last one are
    reduced. Gradients themselves are not counted, but what reducing them takes beyond them is.

    Args:
        model: sharded as a whole, in parts, or not at all.

    Returns:
        0 for a model that is not sharded.
    """
    states = {module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)}
    # One entry each, so that ``max`` has a value without groups.
    stay, buffers, in_use, reduced, kept = [0], [0], [0], [0], [0]
    for group in (group for state in states for group in _groups(state)):
        parameters = sum(_bytes(parameter, None) for parameter in group.fsdp_params)
        reducing = sum(_bytes(parameter, group._reduce_dtype) for parameter in group.fsdp_params)
        # Each rank keeps its share of the reduced gradients.
        results = reducing // max(getattr(group.mesh_info, "shard_mesh_size", 1), 1)
        # Gloo reduces a copy. Gradients are freed once they are copied in.
        copies = 2 if group.mesh_info.mesh.device_type == "cpu" else 1
        # Beyond the gradients themselves, which are counted elsewhere with as many bytes as the gathered parameters.
        beyond = max(reducing, copies * reducing + results - parameters)
        kept.append(max(results - parameters, 0))
        if group._reshard_after_forward:
            in_use.append(parameters)
            reduced.append(beyond)
        else:
            stay.append(parameters)
            buffers.append(max(parameters, beyond - parameters))
    # Two in use: the group whose layers run, and the next one that is gathered meanwhile.
    return sum(stay) + max(buffers) + 2 * max(in_use) + max(reduced) + sum(kept)


def parts_sharded_alone(model: nn.Module) -> list[str]:
    """Names of the submodules that gather their parameters by themselves, in hooks that Dynamo does not trace."""
    return [name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)]


def _groups(state: Any) -> Iterable[Any]:
    # Later releases of PyTorch allow several groups for a module.
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return several
    return () if state._fsdp_param_group is None else (state._fsdp_param_group,)


def _bytes(parameter: Any, reduced: torch.dtype | None) -> int:
    """Of a gathered parameter, or of its gradient in the dtype that gradients are reduced in if that is wider."""
    gathered = parameter.param_dtype or parameter.orig_dtype
    itemsize = max(gathered.itemsize, reduced.itemsize if reduced is not None else 0)
    return int(parameter._orig_size.numel() * itemsize)


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


def step_is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Test for hooks around an optimizer's ``step``, or for something else than a learning rate scheduler that has
    wrapped it: it must then be called once, for all parameters."""
    fields = vars(optimizer)
    hooks = (fields["_optimizer_step_pre_hooks"], fields["_optimizer_step_post_hooks"])
    replaced = fields.get("step")
    # A learning rate scheduler wraps `step` to count calls, which changes nothing in what it does.
    return any(hooks) or (replaced is not None and not getattr(replaced, "_wrapped_by_lr_sched", False))


def note_optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that an optimizer has made a step, for a learning rate scheduler, which warns if its own comes first."""
    if "step" in vars(optimizer):
        vars(optimizer)["_opt_called"] = True
