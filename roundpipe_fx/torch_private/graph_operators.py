"""Operators in a graph: those that save and replay generator states, and copies to the host and back."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

__all__ = [
    "draws_on_own_device",
    "offload_operators",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "save_rng_states",
]

_OFFLOADING = "torch._functorch._activation_offloading.offload_ops"


def save_rng_states(devices: Collection[torch.device]) -> Callable[[], None]:
    """Save the generator states of the CPU and of some devices; returns a function that restores them."""
    host = torch.default_generator.clone_state()  # not a tensor, which would count as memory of the step
    cuda_states = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore() -> None:
        torch.set_rng_state(host.get_state())
        for device, state in cuda_states:
            torch.cuda.set_rng_state(state, device)

    return restore


@functools.cache
def draws_on_own_device(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``run_and_save_rng_state`` or ``run_with_rng_state`` use the generator of the operator's device.

    On CUDA they save and set the state of the *current* device's generator, whatever the operator's device is: in a
    model on several devices, a dropout would be replayed with another mask.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        operator = next(position for position, value in enumerate(args) if not isinstance(value, torch.Tensor))
        tensors = (value for value in args[operator + 1 :] if isinstance(value, torch.Tensor))
        device = torch.device(kwargs.get("device") or next((value.device for value in tensors), "cpu"))
        with torch.accelerator.device_index(None if device.type == "cpu" else device.index):
            return draw(*args, **kwargs)

    return call


@functools.cache
def offload_operators() -> Any:
    """The operators ``ao::offload``, ``ao::reload`` and ``ao::wait_tensor``; ``None``: PyTorch has none, as torch 2.11.

    They copy on a stream of their own, from and to pinned memory.
    """
    if importlib.util.find_spec(_OFFLOADING) is None:
        return None
    importlib.import_module(_OFFLOADING)
    return torch.ops.ao
