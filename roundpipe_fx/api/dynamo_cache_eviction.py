"""Unused compilations: what was compiled for a model goes with the model.

Dynamo keeps what it has compiled for all models of a class as long as the process lives, and from some number on it
compiles no more of that class.
"""

from __future__ import annotations

import contextlib
import weakref

from roundpipe_fx import torch_private
from roundpipe_fx.api.backend import Backend

__all__ = ["Unused", "evict_unused", "evict_when_unused"]

Unused = weakref.finalize
"""Called, it says that nothing uses a backend any more; called again it does nothing."""

_unused: list[Backend] = []
"""Garbage collection may come in the midst of anything, so it only notes backends; :func:`evict_unused` acts."""


def evict_when_unused(compiled: object, backend: Backend) -> Unused:
    """Note that something is compiled with a backend of its own, which ends with it or when the result is called."""
    unused = weakref.finalize(compiled, _unused.append, backend)
    unused.atexit = False
    return unused


def evict_unused() -> None:
    """Have Dynamo drop what it compiled with backends that nothing uses any more."""
    backends = []
    with contextlib.suppress(IndexError):  # other threads take some, garbage collection adds some
        while True:
            backends.append(_unused.pop())
    torch_private.forget_compiled(backends)
