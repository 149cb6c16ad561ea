"""Dispatch modes and fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "TorchDispatchMode",
    "active_dispatch_modes",
    "dispatch_mode_flags",
    "dispatch_modes",
    "fakes_on",
    "inner_tensors",
    "set_dispatch_mode_flags",
    "without_modes",
]


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Context manager without active dispatch modes, including the tracer's fake mode, so that new tensors are real."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def dispatch_mode_flags() -> tuple[bool, ...]:
    """Process-wide flags that tell Dynamo which dispatch modes are active, although modes are thread-local."""
    from torch.utils import _python_dispatch

    return tuple(getattr(_python_dispatch, name) for name in _MODE_FLAGS)


def set_dispatch_mode_flags(flags: tuple[bool, ...]) -> None:
    """Set the flags that :func:`dispatch_mode_flags` returns."""
    from torch.utils import _python_dispatch

    for name, flag in zip(_MODE_FLAGS, flags, strict=True):
        setattr(_python_dispatch, name, flag)
    tell_guards = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)  # not in 2.11
    if tell_guards is not None:
        tell_guards(flags[-1])


def active_dispatch_modes() -> list[Any]:
    """The active dispatch modes of the current thread, outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


@contextlib.contextmanager
def dispatch_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Context manager that activates the dispatch modes of another thread, which waits meanwhile."""
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def fakes_on(device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that replaces a tensor by a fake one on a device, with which ``torch.compile`` traces."""
    mode = FakeTensorMode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return like.requires_grad_(tensor.requires_grad)

    return fake


def inner_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors inside of one of a subclass that is made around others; none of a plain one."""
    if not is_traceable_wrapper_subclass(value):
        return []
    return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
