"""CPython's stack of frames: calls that do not map memory.

CPython keeps the frames of a thread in chunks of 16 KiB. A function that is called at the end of a chunk gets a new
one, which the operating system maps for the call and unmaps when it returns; in a loop that happens in each turn. Where
a chunk ends depends on how deep the caller is, and so would the time that the same compilation takes
(``python -m benchmarks.before 53043ebc`` compares with compilations whose frames lie as they come).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["run_in_one_chunk"]

P = ParamSpec("P")
T = TypeVar("T")

_SLOTS = 40_000
"""Slots of eight bytes of a frame that fits into no chunk of the usual size. The smallest that it fits into has 512
KiB, since their sizes are powers of two; 200 KiB remain for the frames of all that is called from it."""


def run_in_one_chunk(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that its own frame and those of all that it calls lie in one chunk.

    Args:
        function: long-running, since each call maps the chunk anew.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_stacksize=_SLOTS)
    return functools.update_wrapper(run, function)
