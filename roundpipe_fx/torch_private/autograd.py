"""Autograd in this thread: saved-tensor hooks, and whether a backward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "detached_with_version",
    "in_backward",
    "pop_saved_tensor_hooks",
    "push_saved_tensor_hooks",
    "top_saved_tensor_hooks",
    "when_backward_ends",
]


def push_saved_tensor_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """Put a pair on top of this thread's stack of saved-tensor hooks."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    """Take the topmost pair off this thread's stack of saved-tensor hooks."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def top_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The topmost pair of this thread's stack of saved-tensor hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # False: also while something is traced


def detached_with_version(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()`` that shares the version counter, also below autograd, as in a dispatch mode."""
    key = torch._C.DispatchKey.ADInplaceOrView
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(call: Callable[[], None]) -> bool:
    """Have ``call`` called at the end of the backward that this thread is in; ``False`` if it is in none."""
    if not in_backward():
        return False
    torch.autograd.Variable._execution_engine.queue_callback(call)
    return True
