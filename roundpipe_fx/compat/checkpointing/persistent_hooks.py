"""Saved-tensor hooks that outlive their ``with`` block.

Values that are computed in a gradient checkpoint scope may be read, and saved for the backward, after the scope has
ended, as a noisy weight is in RETURNN. So its hooks stay on autograd's stack of hooks for a while. That stack is
strictly last in, first out: a block of other hooks that was entered before the scope and ends after it would pop the
scope's hooks instead of its own. So the end of any ``torch.autograd.graph.saved_tensors_hooks`` first pops persistent
hooks and pushes them back afterwards, so that every other block finds its own hooks, in its own order.

Autograd calls only the topmost hooks. Persistent hooks pass tensors that are not theirs to the next hooks below that
are not persistent.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from roundpipe_fx import torch_private


class _Local(threading.local):
    busy = False
    """Set while the stack is being rearranged. Tensors may die meanwhile, and with them scopes; this is handled
    later."""


_local = _Local()


class PersistentHooks:
    """A pair of hooks of one thread, on the stack from :meth:`push` until some time after :meth:`leave`.

    Args:
        pack: returns a handle for a tensor that is being saved; ``None`` if it is not one of theirs.
        unpack: returns the tensor of a handle.
    """

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._own_pack = pack
        self._own_unpack = unpack
        self._thread = threading.get_ident()
        self._left = False
        self._beneath: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def push(self) -> None:
        """Put the hooks on top of the thread's stack."""
        _take_off_left()
        with _busy():
            self._push()

    def _push(self) -> None:
        top = _top()
        # Hooks of several scopes may lie on each other; all of them pass on to the same ones beneath.
        self._beneath = top._beneath if isinstance(top, PersistentHooks) else top
        torch_private.push_saved_tensor_hooks(self._pack, self._unpack)

    def leave(self) -> None:
        """The hooks are not needed any more: they are popped as soon as they are on top. May be called from any
        thread."""
        self._left = True
        if threading.get_ident() == self._thread:
            _take_off_left()

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        if self._left:
            _take_off_left()  # autograd keeps references to the hooks that it calls
        # In order: the scope's own values, then the user's hooks beneath, then what autograd would do without hooks.
        handle = None if self._left else self._own_pack(tensor)
        if handle is not None:
            return _Packed(handle, self._own_unpack)
        if self._beneath is not None:
            pack, unpack = self._beneath
            return _Packed(pack(tensor), unpack)
        return _Packed((tensor, tensor._version), _unmodified)

    def _unpack(self, packed: _Packed) -> torch.Tensor:
        return packed.unpack(packed.value)


class _Packed:
    """The object that is saved for a tensor, and the function that unpacks it."""

    __slots__ = ("unpack", "value")

    def __init__(self, value: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.value = value
        self.unpack = unpack


def _unmodified(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """The tensor itself. Autograd makes this check only if there are no hooks."""
    tensor, version = saved
    # The check that autograd makes for saved tensors, which it skips where hooks have packed them.
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead."
        )
    return tensor


def _top() -> PersistentHooks | tuple[Callable[..., Any], Callable[..., Any]] | None:
    hooks = torch_private.top_saved_tensor_hooks()
    if hooks is None:
        return None
    owner = getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, PersistentHooks) else hooks


def _take_off_left() -> None:
    """Pop hooks from the top that are not needed any more."""
    # A backward has its own stack; the thread's is restored after it.
    if _local.busy or torch_private.in_backward():
        return
    with _busy():
        while isinstance(top := _top(), PersistentHooks) and top._left:
            torch_private.pop_saved_tensor_hooks()


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    _local.busy = True
    try:
        yield
    finally:
        _local.busy = False


def _guard_other_hooks() -> None:
    """Patch the end of other hooks, so that it leaves persistent ones in place.

    When this module is imported, since a ``with`` statement looks up what ends it when it begins.
    """
    end = saved_tensors_hooks.__exit__

    @functools.wraps(end)
    def end_beneath_persistent(self: saved_tensors_hooks, *args: object) -> None:
        persistent = []
        with _busy():
            # Persistent hooks on top of those that end now are set aside, and come back in their order.
            while isinstance(top := _top(), PersistentHooks):
                torch_private.pop_saved_tensor_hooks()
                persistent.append(top)
            try:
                end(self, *args)
            finally:
                for hooks in reversed(persistent):
                    hooks._push()
        if persistent:
            _take_off_left()

    saved_tensors_hooks.__exit__ = end_beneath_persistent  # type: ignore[method-assign]


_guard_other_hooks()
