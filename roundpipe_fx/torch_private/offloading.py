"""Copies to the host and back in a graph."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

__all__ = ["offload_operators"]

_MODULE = "torch._functorch._activation_offloading.offload_ops"


@functools.cache
def offload_operators() -> Any:
    """The operators ``ao::offload``, ``ao::reload`` and ``ao::wait_tensor``; ``None``: PyTorch has none, as torch 2.11.

    They copy on a stream of their own, from and to pinned memory.
    """
    if importlib.util.find_spec(_MODULE) is None:
        return None
    importlib.import_module(_MODULE)
    return torch.ops.ao
