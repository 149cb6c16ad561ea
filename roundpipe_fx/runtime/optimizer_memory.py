"""Host memory of an optimizer: its state, and copies of parameters that it steps in their place.

State is allocated at the first step. Before that its size is that of the state which an optimizer of the same class and
with the same hyperparameters makes for a parameter of a few elements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import nn

from roundpipe_fx.runtime.stage_updates import is_by_parameter, settings_of_group, updates_by_parameter

_ELEMENTS = 7
"""Of the parameter from which states are extrapolated; no scalar that is part of a state has so many."""


class OptimizerMemory(NamedTuple):
    """Bytes of an optimizer on the host.

    Attributes:
        bytes: of its state and of copies of parameters, and their gradients, once it has stepped.
        allocated: how many of these are allocated already.
    """

    bytes: int
    allocated: int


NO_OPTIMIZER = OptimizerMemory(0, 0)


def sum_of(parts: Iterable[OptimizerMemory]) -> OptimizerMemory:
    """The host memory of several optimizers."""
    parts = [*parts]
    return OptimizerMemory(sum(part.bytes for part in parts), sum(part.allocated for part in parts))


def optimizer_memory(optimizer: torch.optim.Optimizer, parameters: Collection[int]) -> OptimizerMemory:
    """The host memory of an optimizer.

    The state of a class that is not one of ``torch.optim``'s is known only after its first step.

    Args:
        parameters: identities of the model's parameters; others that it has on the host are copies.
    """
    total = allocated = 0
    known = is_by_parameter(optimizer)
    copies = largest = 0
    for group in optimizer.param_groups:
        per_element: dict[torch.dtype, int] = {}
        for parameter in (
            parameter
            for parameter in group["params"]
            if parameter.requires_grad and parameter.device.type in ("cpu", "meta")
        ):
            if id(parameter) not in parameters:
                copies, largest = copies + parameter.nbytes, max(largest, parameter.nbytes)
                allocated += parameter.nbytes
            if optimizer.state.get(parameter):
                state_bytes = sum(
                    value.nbytes for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)
                )
                total, allocated = total + state_bytes, allocated + state_bytes
            elif known:
                if parameter.dtype not in per_element:
                    per_element[parameter.dtype] = _state_per_element(optimizer, group, parameter.dtype)
                total += per_element[parameter.dtype] * parameter.numel()
    # Gradients of copies exist one at a time, or all together.
    return OptimizerMemory(total + copies + (largest if updates_by_parameter(optimizer) else copies), allocated)


def _state_per_element(optimizer: torch.optim.Optimizer, group: dict[str, object], dtype: torch.dtype) -> int:
    """Bytes of state for each element of a parameter that has had none."""
    parameter = nn.Parameter(torch.zeros(_ELEMENTS, dtype=dtype, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    sample = type(optimizer)([{**settings_of_group(group), "params": [parameter]}])  # type: ignore[call-arg]
    sample.step()
    values = [value for value in sample.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(value.element_size() for value in values if value.numel() == _ELEMENTS)
