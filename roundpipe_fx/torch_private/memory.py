"""Memory: the allocator's activity while a function runs."""

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
    """Memory that was allocated while a function ran.

    Attributes:
        peak: peak bytes beyond those that were allocated when it began.
        left: bytes that are still allocated.
    """

    peak: int
    left: int


_profiling = threading.local()
"""The callbacks to call with the memory of the function that is being profiled in a thread, if one is."""


def profile_memory(run: Callable[[], _T], device_type: str, seen: Callable[[ProfiledMemory], None]) -> _T:
    """Run a function and measure its memory, including workspaces of kernels.

    It uses the profiler's record of this thread's allocations. If the function runs inside another one that is being
    profiled, ``seen`` is called with the memory of the outer one.

    Args:
        run: the function.
        device_type: ``"cpu"`` or ``"cuda"``.
        seen: called with the memory.

    Returns:
        the result of ``run``.

    Raises:
        RuntimeError: a profiler of the user is active on this thread.
    """
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    others: list[Callable[[ProfiledMemory], None]] | None = getattr(_profiling, "others", None)
    if others is not None:
        others.append(seen)
        return run()
    if profiler_runs():
        raise RuntimeError("memory cannot be measured while a profiler runs on the same thread: stop one of the two.")
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(config)
    _profiling.others = told = [seen]
    try:
        result = run()
    finally:
        del _profiling.others
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
    """Whether this thread's memory is being profiled, by us or by a profiler of the user."""
    return torch._C._autograd._profiler_enabled()


def profiler_runs() -> bool:
    """Whether a profiler of the user is active on this thread."""
    return getattr(_profiling, "others", None) is None and memory_is_profiled()
