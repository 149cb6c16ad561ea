"""RETURNN's gradient checkpoint scope: values computed inside are not saved for the backward, wherever they are read.

::

    with gradient_checkpoint_scope():
        weight = self.weight + torch.randn_like(self.weight)
    y = x @ weight  # needs the noisy weight for the backward: it is recomputed then, not saved

A checkpointed *function* does not save values that it computes and reads itself, but values that leave it are saved by
their readers. A scope is about the *values*: those computed inside are never saved.

Eagerly, a dispatch mode records the operations inside (:mod:`roundpipe_fx.compat.checkpointing.tape`), and saved-tensor
hooks replace each tensor that was computed there by a handle, also after the scope has ended, as long as any such
tensor is alive (:mod:`roundpipe_fx.compat.checkpointing.persistent_hooks`). When the backward unpacks the first handle,
the tape recomputes all of them; each is freed after its use. Compiled, the scope is a mark on the values, which the
planner obeys.

From RETURNN (``returnn.torch.util.gradient_checkpoint``), which uses it for variational weight noise. It records and
replays in the same way, but always replays the whole scope, with one state of the generators for all of it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from roundpipe_fx import torch_private
from roundpipe_fx.compat.checkpointing.persistent_hooks import PersistentHooks
from roundpipe_fx.compat.checkpointing.tape import Tape, View
from roundpipe_fx.ir.recompute_marks import annotated_scope
from roundpipe_fx.torch_private import TorchDispatchMode


class _Local(threading.local):
    def __init__(self) -> None:
        self.scopes: list[gradient_checkpoint_scope] = []
        """Scopes that are entered, or that have ended while some of their tensors are alive; oldest first."""
        self.recomputing = False


_local = _Local()


class gradient_checkpoint_scope:
    """Context manager: tensors that are computed inside are not saved for the backward, but recomputed when first
    needed.

    ::

        with roundpipe_fx.gradient_checkpoint_scope():
            x = a + b
        y = x * c  # x is not saved, although it is read outside

    Random numbers are redrawn from the same generator states, recomputation does not depend on autocast, and recomputed
    tensors are freed after their use. Scopes nest. Without gradients a scope does nothing. Other saved-tensor hooks
    that are entered inside the scope are called first, as usual; those around it are called for tensors that were not
    computed inside.

    Use each object for one ``with``. In a model compiled with roundpipe_fx a scope marks the values, which are then
    never saved, whatever the budget.

    Raises:
        RuntimeError: entered twice, or ended in another thread than it was entered in; in the backward, when a tensor
            that the scope reads has been updated in place since.
    """

    def __init__(self) -> None:
        self._in_graph = annotated_scope() if torch.compiler.is_compiling() else None
        self._recorder: _Recorder | None = None

    def __enter__(self) -> None:
        if self._in_graph is not None:
            next(self._in_graph)
            return
        if self._recorder is not None:
            raise RuntimeError("this gradient_checkpoint_scope was entered before: make a new one for each use.")
        self._enter()

    def __exit__(self, *error: Any) -> None:
        if self._in_graph is not None:
            next(self._in_graph, None)
            return
        self._check_thread("ended")
        assert self._recorder is not None
        self._recorder.__exit__(*error)
        self._ended = True
        self._leave_if_over()

    def exit_saved_tensors_hooks_scope(self) -> None:
        """Ends the effect after the scope: tensors computed inside are from now on saved like others by new readers.

        Without this call that happens when the last of them has died. Has no effect inside the scope, or if it has
        happened.

        Raises:
            RuntimeError: called in another thread than the scope was entered in.
        """
        if self._in_graph is not None:
            return
        self._check_thread("left")
        if self._ended:
            self._leave()

    def _enter(self) -> None:
        self._thread = threading.get_ident()
        self._among = _local.scopes
        self._ended = False
        self._tape = Tape(_make_reference, _make_death_callback(weakref.ref(self)))
        self._handles: weakref.WeakSet[_Handle] = weakref.WeakSet()
        self._hooks = PersistentHooks(_pack, _unpack)
        self._recorder = _Recorder(self._tape)
        self._hooks.push()
        _local.scopes.append(self)
        self._recorder.__enter__()

    def _check_thread(self, action: str) -> None:
        if self._recorder is None:
            raise RuntimeError(f"this gradient_checkpoint_scope was {action} before it was entered.")
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"this gradient_checkpoint_scope was {action} in another thread than it was entered in: saved-tensor "
                "hooks belong to a thread."
            )

    def _leave_if_over(self) -> None:
        """Leave if the scope has ended and no tensor that was computed inside is alive. May be called from any
        thread."""
        # The hooks stay as long as a value of the scope lives: its readers may still save it.
        if self._ended and not self._tape.lives:
            self._leave()

    def _leave(self) -> None:
        self._hooks.leave()
        if self in self._among:
            self._among.remove(self)
        # What no handle refers to is never asked for, so entries that lead only there are dropped.
        self._tape.prune({handle.view.number for handle in self._handles})

    def _handle_of(self, tensor: torch.Tensor) -> _Handle | None:
        view = self._tape.find_view(tensor)
        if view is None:
            return None
        handle = _Handle(self._tape, self._handles, view)
        self._handles.add(handle)
        return handle


def _make_death_callback(scope: weakref.ref[gradient_checkpoint_scope]) -> Callable[[], None]:
    def leave() -> None:
        alive_scope = scope()
        if alive_scope is not None:
            alive_scope._leave_if_over()

    return leave


class _Recorder(TorchDispatchMode):
    """Records the operations of its thread on a tape.

    If modes of several threads overlap, PyTorch's flags for Dynamo, which are global, would stay as if one were still
    active; so the last recorder restores them to their values before the first.
    """

    _lock = torch_private.ForkedLock()
    _active = 0
    _before: tuple[bool, ...] = ()
    _meanwhile: tuple[bool, ...] = ()

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __enter__(self) -> _Recorder:
        with _Recorder._lock:
            if not _Recorder._active:
                _Recorder._before = torch_private.dispatch_mode_flags()
            _Recorder._active += 1
            super().__enter__()
            _Recorder._meanwhile = torch_private.dispatch_mode_flags()
        return self

    def __exit__(self, *error: Any) -> None:
        with _Recorder._lock:
            super().__exit__(*error)
            _Recorder._active -= 1
            torch_private.set_dispatch_mode_flags(_Recorder._meanwhile if _Recorder._active else _Recorder._before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch_private.conjugates_resolved():
            # What recomputation runs inside another scope must not be recorded there.
            if _local.recomputing:
                return func(*args, **(kwargs or {}))
            return self._tape.run(func, args, kwargs or {})


class _Handle:
    """Stands for a tensor in autograd's graph."""

    value: torch.Tensor | None = None

    def __init__(self, tape: Tape, all_handles: weakref.WeakSet[_Handle], view: View) -> None:
        self.view = view
        self._tape = tape
        self._all_handles = all_handles
        self._writes = tape.count_writes(view.number)

    def get(self) -> torch.Tensor:
        """Get the tensor, recomputed if necessary; the handle does not keep it."""
        if self._tape.count_writes(self.view.number) != self._writes:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self.view.size)} made in a gradient_checkpoint_scope, after it was saved."
            )
        value = vars(self).pop("value", None)  # at once, as threads of the backward may ask for it together
        return self._recompute() if value is None else value

    def _recompute(self) -> torch.Tensor:
        """Recompute the tensors of all handles of the scope; those of other handles are held until the backward
        ends."""
        # All handles at once: entries that several values need are replayed once for all of them.
        handles = [handle for handle in self._all_handles if handle.value is None and handle is not self]
        if not torch_private.when_backward_ends(lambda: _drop(handles)):
            handles = []  # a saved tensor is accessed outside of a backward
        outer, _local.recomputing = _local.recomputing, True
        try:
            storages = self._tape.recompute({handle.view.number for handle in (self, *handles)})
        finally:
            _local.recomputing = outer
        for handle in handles:
            handle.value = handle.view.make_tensor(storages[handle.view.number])
        return self.view.make_tensor(storages[self.view.number])


def _drop(handles: list[_Handle]) -> None:
    for handle in handles:
        handle.value = None


def _pack(tensor: torch.Tensor) -> _Handle | None:
    # The innermost scope that made the tensor has it.
    for scope in reversed(tuple(_local.scopes)):
        handle = scope._handle_of(tensor)
        if handle is not None:
            return handle
    return None


def _unpack(handle: _Handle) -> torch.Tensor:
    return handle.get()


def _make_reference(tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """Returns a function that gives a tensor of another scope later, without keeping it."""
    handle = _pack(tensor)
    return None if handle is None else handle.get
