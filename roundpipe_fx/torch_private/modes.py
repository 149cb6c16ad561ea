"""Dispatch modes and fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef as StorageReference
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "StorageReference",
    "TorchDispatchMode",
    "active_dispatch_modes",
    "conjugates_resolved",
    "dispatch_mode_flags",
    "dispatch_modes",
    "fake_mode",
    "fakes_on",
    "inner_tensors",
    "set_dispatch_mode_flags",
    "with_harmless_checks",
    "without_class",
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


@contextlib.contextmanager
def fake_mode() -> Iterator[None]:
    """Context manager that makes new tensors fake, whatever modes are active outside."""
    with without_modes(), FakeTensorMode():
        yield


def fakes_on(device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that replaces a tensor by a fake one on a device, with which ``torch.compile`` traces."""
    mode = FakeTensorMode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return empty.requires_grad_(tensor.requires_grad)

    return fake


def inner_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors inside of one of a subclass that is made around others; none of a plain one."""
    if not is_traceable_wrapper_subclass(value):
        return []
    return [getattr(value, name) for name in value.__tensor_flatten__()[0]]


_LAZY = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)


@contextlib.contextmanager
def conjugates_resolved() -> Iterator[None]:
    """Context manager for what a dispatch mode does with an operation: conjugates are resolved as without the mode.

    PyTorch calls a mode with the fallback for conjugated and negated views switched off. A kernel that makes such views
    and computes with them, as that of ``pinv`` does, would take them for what they are views of.
    """
    # Only keys that are excluded now are included again and excluded at the end: nested calls restore what they found.
    excluded = [key for key in _LAZY if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in excluded:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        for key in excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


def with_harmless_checks(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A compiled forward that computes in its first call what it does in the others.

    AOTAutograd makes the first call under a dispatch mode that checks whether results of custom operators alias their
    operands. The mode refuses operands of plain subclasses of tensors, and conjugates are not resolved under it. Here
    the same check is made without either.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

    checked = False

    def forward(arguments: list[Any]) -> Any:
        nonlocal checked
        if checked:
            return run(arguments)
        # Another mode, or none: it is not AOTAutograd's checking call.
        if type(_get_current_dispatch_mode()).__name__ != "_AnalyzeCustomOpInputOutputMode":
            return run(arguments)
        checked = True
        with _pop_mode_temporarily() as check, _Harmless(check):
            return run(arguments)

    forward._boxed_call = True  # type: ignore[attr-defined]
    return forward


class _Harmless(TorchDispatchMode):
    """Another mode, under which operations compute what they do without it."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with conjugates_resolved():
            result = self._mode.__torch_dispatch__(func, types, args, kwargs)
            # Refused because of a plain subclass: the operation is run without the check, as it would be outside the
            # mode.
            if result is NotImplemented and not any(map(_dispatches, types)):
                result = func(*args, **(kwargs or {}))
        return result


def without_class(run: Callable[..., Any], examples: Sequence[Any]) -> Callable[..., Any]:
    """Let a compiled graph get inputs of plain subclasses as tensors; Dynamo restores the class of results.

    AOTAutograd's check in the first call (:func:`with_harmless_checks`) refuses them even before the graph is run.

    Args:
        examples: the inputs for which it was compiled.
    """
    plain = [position for position, value in enumerate(examples) if _is_of_plain_subclass(value)]
    if not plain:
        return run

    def run_on_tensors(*arguments: Any) -> Any:
        tensors = list(arguments)
        for position in plain:
            tensors[position] = tensors[position].as_subclass(torch.Tensor)
        return run(*tensors)

    return run_on_tensors


def _is_of_plain_subclass(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
        return False
    return type(value) is not torch.Tensor and not _dispatches(type(value))


def _dispatches(kind: type) -> bool:
    """Return whether tensors of a class are called with each operation."""
    return getattr(kind, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl
