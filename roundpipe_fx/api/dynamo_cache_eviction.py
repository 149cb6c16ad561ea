"""Eviction from Dynamo's cache: what was compiled for a model is dropped with the model.

Dynamo keeps everything that it has compiled for models of a class for the life of the process, and stops compiling that
class at a limit.
"""

from __future__ import annotations

import contextlib
import weakref

from roundpipe_fx import torch_private
from roundpipe_fx.api.backend import Backend

__all__ = ["Unused", "evict_unused", "evict_when_unused"]

Unused = weakref.finalize
"""When called, it notes that nothing uses a backend any more; further calls do nothing."""

_unused: list[Backend] = []
"""Garbage collection may run at any point, so it only notes backends; :func:`evict_unused` acts."""


def evict_when_unused(compiled: object, backend: Backend) -> Unused:
    """Note that an object is compiled with its own backend, which is unused once the object dies or the result is
    called."""
    unused = weakref.finalize(compiled, _unused.append, backend)
    unused.atexit = False
    return unused


def evict_unused() -> None:
    """Have Dynamo drop what it compiled with unused backends."""
    backends = []
    with contextlib.suppress(IndexError):  # other threads take some, garbage collection adds some
        while True:
            backends.append(_unused.pop())
    torch_private.forget_compiled(backends)
