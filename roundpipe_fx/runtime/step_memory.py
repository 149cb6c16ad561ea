"""Memory of a step on the devices when it runs out: what the step has allocated, and what was there before.

What was allocated when a step began is noted at each beginning, which costs a look at the allocator's counters. All
else is looked for only after an error: parameters and gradients are the model's, an optimizer is one that has a
parameter of the model.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_fx.runtime.library_memory import library_bytes
from roundpipe_fx.torch_private import inner_tensors, tree_leaves


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of a device in a step, in bytes.

    Attributes:
        device: name of the device.
        total: the device's whole memory, used or not.
        free: free for any process.
        reserved: that the allocator of this process has taken.
        allocated: of these, in use.
        before: allocated when the step began.
        parameters: of the model's parameters and buffers.
        gradients: of their gradients, as far as they were allocated before.
        optimizer: of the state of optimizers that have parameters of the model.
    """

    device: str
    total: int
    free: int
    reserved: int
    allocated: int
    before: int
    parameters: int
    gradients: int
    optimizer: int
    libraries: int

    @property
    def of_step(self) -> int:
        """Bytes that the step has allocated and not freed."""
        return max(self.allocated - self.before, 0)

    @property
    def others(self) -> int:
        """Bytes allocated before the step that are none of the model's, its optimizers' and of libraries."""
        return max(self.before - self.parameters - self.gradients - self.optimizer - self.libraries, 0)

    @property
    def available(self) -> int:
        """Bytes that the step could have had, if no memory were lost between allocated blocks."""
        return max(self.free + self.reserved - self.before, 0)


def allocated_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that this process has allocated; cheaper than ``torch.cuda.memory_allocated``, which sorts
    all counters."""
    return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"])


def device_memory(device: torch.device, before: int, models: Sequence[nn.Module]) -> DeviceMemory:
    """Look at the memory of a CUDA device.

    Args:
        before: bytes allocated when the step began.
        models: whose parameters, gradients and optimizers are told apart from others.
    """
    parameters = [parameter for model in models for parameter in model.parameters()]
    buffers = [buffer for model in models for buffer in model.buffers()]
    weight_bytes = _bytes_on(device, [*parameters, *buffers])
    states = (optimizer.state.values() for optimizer in _optimizers_of({id(parameter) for parameter in parameters}))
    state_bytes = _bytes_on(device, tree_leaves([*map(list, states)]))
    gradients = _bytes_on(device, [parameter.grad for parameter in parameters])
    libraries = library_bytes(device)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        device=str(device),
        total=total,
        free=free,
        reserved=torch.cuda.memory_reserved(device),
        allocated=torch.cuda.memory_allocated(device),
        before=before,
        parameters=weight_bytes,
        # A part of the step that has run its backward may have accumulated some already.
        gradients=min(gradients, max(before - weight_bytes - state_bytes - libraries, 0)),
        optimizer=state_bytes,
        libraries=libraries,
    )


def _optimizers_of(parameters: Collection[int]) -> list[torch.optim.Optimizer]:
    """The optimizers of this process that have one of some parameters, by identity. PyTorch keeps no list of them."""
    return [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), torch.optim.Optimizer)
        # One whose constructor has failed, or has not ended, has no groups.
        and any(
            id(parameter) in parameters
            for group in getattr(candidate, "param_groups", ())
            for parameter in group["params"]
        )
    ]


def _bytes_on(device: torch.device, values: Iterable[Any]) -> int:
    """Bytes of the storages of tensors that are on a device, each storage once; other values have none."""
    sizes: dict[int, int] = {}
    left = [value for value in values if isinstance(value, torch.Tensor)]
    while left:
        tensor = left.pop()
        inner = inner_tensors(tensor)
        left += inner
        if not inner and tensor.device == device and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())
