"""Memory: what the allocator hands out while something runs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

__all__ = ["ProfiledMemory", "memory_is_profiled", "profile_memory", "profiler_runs"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class ProfiledMemory:
    """What the allocator of a device handed out while something ran.

    Attributes:
        peak: bytes, beyond those that were allocated when it began, at most at one time.
        left: those of them that are allocated still.
    """

    peak: int
    left: int


_watching = threading.local()
"""Whom to tell about the memory of what runs in this thread, if it is being watched."""


def profile_memory(run: Callable[[], _T], device_type: str, seen: Callable[[ProfiledMemory], None]) -> _T:
    """Run something and watch the allocator meanwhile, what kernels allocate inside themselves included.

    It is the profiler's record of this thread's allocations. What runs inside something that is watched already is
    told of the memory of the whole.

    Args:
        run: what to run.
        device_type: ``"cpu"`` or ``"cuda"``.
        seen: told of the memory.

    Raises:
        RuntimeError: a profiler of the user's runs on this thread.
    """
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    others: list[Callable[[ProfiledMemory], None]] | None = getattr(_watching, "others", None)
    if others is not None:
        others.append(seen)
        return run()
    if profiler_runs():
        raise RuntimeError("memory cannot be watched while a profiler runs on the same thread: stop one of the two.")
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(config)
    _watching.others = told = [seen]
    try:
        result = run()
    finally:
        del _watching.others
        records = _disable_profiler_legacy()
    live = peak = 0
    for event in itertools.chain.from_iterable(records):
        if event.kind() == "memory_alloc":
            live += event.cpu_memory_usage() if device_type == "cpu" else event.cuda_memory_usage()
            peak = max(peak, live)
    for tell in told:
        tell(ProfiledMemory(peak, live))
    return result


def memory_is_profiled() -> bool:
    """Whether this thread's memory is being watched, or a profiler of the user's runs on it."""
    return torch._C._autograd._profiler_enabled()


def profiler_runs() -> bool:
    """Whether a profiler of the user's runs on this thread."""
    return getattr(_watching, "others", None) is None and memory_is_profiled()
