"""Dispatch modes and fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = [
    "active_dispatch_modes",
    "dispatch_mode_flags",
    "dispatch_modes",
    "fakes_on",
    "set_dispatch_mode_flags",
    "without_modes",
]


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """No dispatch mode is active inside, the tracer's fake mode included: tensors that are made are real."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def dispatch_mode_flags() -> tuple[bool, ...]:
    """What Dynamo is told about dispatch modes being active: flags of the process, although modes are of a thread."""
    from torch.utils import _python_dispatch

    return tuple(getattr(_python_dispatch, name) for name in _MODE_FLAGS)


def set_dispatch_mode_flags(flags: tuple[bool, ...]) -> None:
    """Set what :func:`dispatch_mode_flags` tells."""
    from torch.utils import _python_dispatch

    for name, flag in zip(_MODE_FLAGS, flags, strict=True):
        setattr(_python_dispatch, name, flag)
    tell_guards = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)  # not in 2.11
    if tell_guards is not None:
        tell_guards(flags[-1])


def active_dispatch_modes() -> list[Any]:
    """The dispatch modes that are active in this thread, outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


@contextlib.contextmanager
def dispatch_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Dispatch modes that another thread has active, active in this one too while that waits."""
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def fakes_on(device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that stands a fake tensor, which has no memory, in for a tensor; ``torch.compile`` traces with it."""
    mode = FakeTensorMode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return like.requires_grad_(tensor.requires_grad)

    return fake
