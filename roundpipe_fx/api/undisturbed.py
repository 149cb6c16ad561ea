"""Compiles undisturbed by the interpreter.

Passes create many objects that stay alive, and garbage collection would scan them again and again. And CPython keeps
the frames of a thread in chunks of 16 KiB: a function that is called at the end of a chunk gets a new one, mapped and
unmapped by the operating system at each call (seen with CPython 3.11). Where a chunk ends depends on how deep the
user's call is, and so would the time that the same plan takes.

Tracing makes many objects as well, and takes longer, so collection goes on there; but each full one would walk all that
the process has loaded before, which is much more.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

__all__ = ["Frozen", "old_objects_frozen", "undisturbed"]

P = ParamSpec("P")
T = TypeVar("T")

_SLOTS = 40_000
"""Slots of eight bytes for a frame that does not fit into a chunk. The next larger one is of 512 KiB, of which 200 KiB
remain for all that is called from that frame."""


def undisturbed(function: Callable[P, T]) -> Callable[P, T]:
    """A function that runs another one without garbage collection, its frames in one chunk of the interpreter's stack.

    Args:
        function: any.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if was_enabled:
                gc.enable()

    run.__code__ = run.__code__.replace(co_stacksize=_SLOTS)
    return functools.update_wrapper(run, function)


class Frozen:
    """Who has frozen objects.

    Attributes:
        by_us: whether a compilation has, in any thread.
        by_user: whether the user was seen to have. It is not asked again: the interpreter counts frozen objects one by
            one, which takes as long as a collection that they are left out of.
    """

    by_us = False
    by_user = False


@contextlib.contextmanager
def old_objects_frozen() -> Iterator[None]:
    """Context manager in which garbage collection leaves out the objects that there were before.

    Where some are frozen already, by the user or by a compilation in another thread, that stays as it is.
    """
    if not (Frozen.by_us or Frozen.by_user):
        Frozen.by_user = bool(gc.get_freeze_count())
    if Frozen.by_us or Frozen.by_user:
        yield
        return
    Frozen.by_us = True
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        Frozen.by_us = False
