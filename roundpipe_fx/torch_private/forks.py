"""Forks: what a forked process lacks, so that a child such as a worker of a ``DataLoader`` may call a compiled model.

A child has a copy of the parent's memory, and of its threads only the one that forked. Whoever waits there for a thread
of the parent, or for a lock that one held, waits forever. So objects with threads forget them in the child and start
others when they are asked for work, and locks that other threads held are replaced. The same is done by PyTorch and by
``logging`` for theirs; there is no private interface here, but everything above may need it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["ForkedLock", "when_forked"]

T = TypeVar("T")

_before: dict[int, tuple[weakref.ref[Any], Callable[[Any], None]]] = {}
_in_child: dict[int, tuple[weakref.ref[Any], Callable[[Any], None]]] = {}


def when_forked(owner: T, in_child: Callable[[T], None], before: Callable[[T], None] | None = None) -> None:
    """Call functions with an object whenever this process is forked, as long as the object exists.

    Args:
        owner: the object. It is not kept alive.
        in_child: called in each child process, before the child's program goes on. Must not wait for anything.
        before: called in the thread that forks, before it does.
    """
    key = id(owner)

    def forget(_: Any) -> None:
        _before.pop(key, None)
        _in_child.pop(key, None)

    reference = weakref.ref(owner, forget)
    _in_child[key] = reference, in_child
    if before is not None:
        _before[key] = reference, before


def _call_all(registered: dict[int, tuple[weakref.ref[Any], Callable[[Any], None]]]) -> None:
    for reference, call in list(registered.values()):
        owner = reference()
        if owner is not None:
            call(owner)


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(before=lambda: _call_all(_before), after_in_child=lambda: _call_all(_in_child))


class ForkedLock:
    """A reentrant lock that in a forked process no thread of the parent holds, but the one that forked."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        when_forked(self, ForkedLock._renew)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _renew(self) -> None:
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()
