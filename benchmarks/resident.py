"""Physical bytes on the CPU: the resident set of a process, with an allocator that returns what is freed at once."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
"""Settings with which glibc returns freed memory to the system at once."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of ``mallopt``."""
_PATIENCE = 900


class Peak:
    """The peak of the resident set from here on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _resident("VmRSS")

    def bytes(self) -> int:
        """Bytes at most, beyond those at the beginning."""
        return _resident("VmHWM") - self._before


def cpu_seconds() -> float:
    """Processor seconds of this process, and of those that it started and that ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def _resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))


def keep_freed_memory() -> None:
    """From now on, let the allocator keep what is freed, as it does by default: seconds are measured so."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_TRIM_THRESHOLD, 1 << 30)
    libc.mallopt(_MMAP_THRESHOLD, 32 << 20)


def in_a_process(benchmark: str, *arguments: str) -> dict[str, Any] | str:
    """Run a benchmark's measurement in a process with one thread, where the disk has nothing compiled.

    Args:
        benchmark: module of ``benchmarks``; its last line of output is JSON.
        arguments: of its command line.

    Returns:
        what it printed, or the last line of its error.
    """
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{benchmark}", *arguments]
    environment = {**os.environ, **_ALLOCATOR, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in the process itself, so that its seconds are counted
    with tempfile.TemporaryDirectory() as cache:
        environment |= {"TORCHINDUCTOR_CACHE_DIR": cache, "ROUNDPIPE_FX_CACHE": cache}
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, env=environment)
    lines = ran.stdout.splitlines()
    if ran.returncode or not lines:
        return (ran.stderr.splitlines() or [f"ended with {ran.returncode}"])[-1]
    found: dict[str, Any] = json.loads(lines[-1])
    return found
