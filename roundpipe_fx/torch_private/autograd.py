"""Autograd in the current thread: saved-tensor hooks, and whether a backward is running."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = [
    "autograd_in_kernels",
    "detached_with_version",
    "graph_is_kept",
    "in_backward",
    "pop_saved_tensor_hooks",
    "push_saved_tensor_hooks",
    "top_saved_tensor_hooks",
    "unseen_by_autograd",
    "when_backward_ends",
]


def push_saved_tensor_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """Push a pair onto the current thread's stack of saved-tensor hooks."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    """Pop the top pair of the current thread's stack of saved-tensor hooks."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def top_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The top pair of the current thread's stack of saved-tensor hooks; ``None`` if it is empty."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # False: not ignored while tracing


def detached_with_version(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()`` that shares the version counter, even below autograd, as in a dispatch mode."""
    key = torch._C.DispatchKey.ADInplaceOrView
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def unseen_by_autograd(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Context manager in which a tensor is written to as ``tensor.data`` is: its version stays as it was."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)


def in_backward() -> bool:
    """Return whether autograd is running a backward in the current thread."""
    return torch._C._current_graph_task_id() != -1


def graph_is_kept() -> bool:
    """Test for ``retain_graph`` of the backward that the current thread is running; ``False`` if there is none."""
    return in_backward() and torch._C._autograd._get_current_graph_task_keep_graph()


def when_backward_ends(call: Callable[[], None]) -> bool:
    """Call ``call`` at the end of the backward that the current thread is running; ``False`` if there is none."""
    if not in_backward():
        return False
    torch.autograd.Variable._execution_engine.queue_callback(call)
    return True


@contextlib.contextmanager
def autograd_in_kernels() -> Iterator[None]:
    """Context manager that enables autograd inside an operator's kernel, where it is disabled."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    with (
        torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded),
        torch.enable_grad(),
    ):
        yield


_AUTOGRAD = [
    getattr(torch._C.DispatchKey, name)
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradXPU", "AutogradMPS", "AutogradOther", "ADInplaceOrView")
    if hasattr(torch._C.DispatchKey, name)
]
