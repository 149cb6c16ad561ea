"""FSDP2 (``fully_shard``): what it allocates beside the forward and backward of what it shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["gathered_bytes", "parts_sharded_alone"]


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
    stay, buffers, in_use, reduced, kept = [0], [0], [0], [0], [0]
    for group in (group for state in states for group in _groups(state)):
        parameters = sum(_bytes(parameter, None) for parameter in group.fsdp_params)
        reducing = sum(_bytes(parameter, group._reduce_dtype) for parameter in group.fsdp_params)
        results = reducing // max(getattr(group.mesh_info, "shard_mesh_size", 1), 1)
        # Gloo reduces a copy. Gradients are freed once they are copied in.
        copies = 2 if group.mesh_info.mesh.device_type == "cpu" else 1
        beyond = max(reducing, copies * reducing + results - parameters)
        kept.append(max(results - parameters, 0))
        if group._reshard_after_forward:
            in_use.append(parameters)
            reduced.append(beyond)
        else:
            stay.append(parameters)
            buffers.append(max(parameters, beyond - parameters))
    return sum(stay) + max(buffers) + 2 * max(in_use) + max(reduced) + sum(kept)


def parts_sharded_alone(model: nn.Module) -> list[str]:
    """Names of the submodules that gather their parameters by themselves, in hooks that Dynamo does not trace."""
    return [name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)]


def _groups(state: Any) -> Iterable[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return several
    return () if state._fsdp_param_group is None else (state._fsdp_param_group,)


def _bytes(parameter: Any, reduced: torch.dtype | None) -> int:
    """Of a gathered parameter, or of its gradient in the dtype that gradients are reduced in if that is wider."""
    gathered = parameter.param_dtype or parameter.orig_dtype
    itemsize = max(gathered.itemsize, reduced.itemsize if reduced is not None else 0)
    return int(parameter._orig_size.numel() * itemsize)
