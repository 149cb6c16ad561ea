"""Memory: the allocator's activity while a function runs, and who refers to a tensor's memory.

The allocator tells PyTorch's profilers of each allocation, and of each one that is freed. The legacy profiler is used
here: it records one thread, and costs some ten microseconds. As it cannot be entered twice, a function that runs inside
another one that is being recorded is marked in the record of the outer one, and is told of its part when that ends.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

__all__ = [
    "Allocation",
    "ProfiledMemory",
    "compiled_calls_are_seen",
    "count_sharing",
    "is_sole_reference",
    "profile_memory",
    "profiler_runs",
    "record_allocations",
    "recorded_history",
    "wrap_compiled_calls",
]

_T = TypeVar("_T")


@dataclass(frozen=True)
class ProfiledMemory:
    """Memory that was allocated while a function ran.

    Attributes:
        peak: peak bytes beyond those that were allocated when it began.
        retained: bytes that are still allocated.
    """

    peak: int
    retained: int


@dataclass(frozen=True)
class Allocation:
    """Memory that was allocated, or freed.

    Attributes:
        seconds: when, by ``time.perf_counter``.
        cpu: bytes on the CPU, negative if they were freed.
        cuda: the same on a CUDA device.
    """

    seconds: float
    cpu: int
    cuda: int


_Report = Callable[[Sequence[Allocation]], None]


@dataclass
class _Recorded:
    """Events that are being recorded in a thread.

    Attributes:
        inner: the functions that ran inside the recorded one, by number: called with their parts.
        finished: the numbers of those that have returned.
    """

    inner: dict[str, _Report] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)


class _Recording(threading.local):
    recorded: _Recorded | None = None


_recording = _Recording()
_numbers = itertools.count()
_BEGIN, _END = "roundpipe_fx begins ", "roundpipe_fx ends "


def profile_memory(run: Callable[[], _T], device_type: str, report: Callable[[ProfiledMemory], None]) -> _T:
    """Run a function and measure its memory, including workspaces of kernels.

    Arguments and errors as for :func:`record_allocations`, but for these.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        report: called with the memory.
    """

    def see(allocations: Sequence[Allocation]) -> None:
        live = peak = 0
        for allocation in allocations:
            live += allocation.cpu if device_type == "cpu" else allocation.cuda
            peak = max(peak, live)
        report(ProfiledMemory(peak, live))

    return record_allocations(run, see)


def record_allocations(run: Callable[[], _T], report: _Report) -> _T:
    """Run a function and record what this thread allocates and frees meanwhile.

    Args:
        report: called with the record, unless ``run`` raises an exception: when it has returned, or if it runs inside
            another function that is being recorded in the same thread, when that one has.

    Returns:
        the result of ``run``.

    Raises:
        RuntimeError: a profiler of the user is active on this thread.
    """
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    # The profiler cannot be entered twice, so a nested function is marked in the outer record.
    if _recording.recorded is not None:
        return _mark_and_run(run, report, _recording.recorded)
    if profiler_runs():
        raise RuntimeError("memory cannot be measured while a profiler runs on the same thread: stop one of the two.")
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(config)
    # Events count microseconds from the first one on; this is the first one's time.
    began = time.perf_counter()
    _recording.recorded = recorded = _Recorded()
    try:
        result = run()
    except BaseException:
        _recording.recorded = None
        _report_all(_disable_profiler_legacy(), began, recorded, lambda _: None)
        raise
    _recording.recorded = None
    _report_all(_disable_profiler_legacy(), began, recorded, report)
    return result


def _mark_and_run(run: Callable[[], _T], report: _Report, recorded: _Recorded) -> _T:
    """Run a function inside a recorded one."""
    from torch._C._profiler import _RecordFunctionFast

    number = str(next(_numbers))
    recorded.inner[number] = report
    with _RecordFunctionFast(_BEGIN + number):
        pass
    result = run()
    with _RecordFunctionFast(_END + number):
        pass
    recorded.finished.add(number)
    return result


def _report_all(records: Sequence[Sequence[Any]], began: float, recorded: _Recorded, report: _Report) -> None:
    """Tell a recorded function and those inside it of their allocations.

    Args:
        records: the profiler's events, by thread.
        began: when the first of them was recorded.
        report: of the outer function.
    """
    events = [*itertools.chain.from_iterable(records)]
    allocations: list[Allocation] = []
    begun: dict[str, int] = {}
    parts: dict[str, tuple[int, int]] = {}
    # Allocations in order; marks of nested functions say which of them are theirs.
    for event in events:
        kind = event.kind()
        if kind == "memory_alloc":
            seconds = began + events[0].cpu_elapsed_us(event) / 1e6
            allocations.append(Allocation(seconds, event.cpu_memory_usage(), event.cuda_memory_usage()))
        elif kind == "push" and recorded.inner:
            name = event.name()
            if name.startswith(_BEGIN):
                begun[name.removeprefix(_BEGIN)] = len(allocations)
            elif name.startswith(_END):
                number = name.removeprefix(_END)
                parts[number] = begun[number], len(allocations)
    for number in recorded.finished:
        first, last = parts[number]
        recorded.inner[number](allocations[first:last])
    report(allocations)


def profiler_runs() -> bool:
    """Return whether a profiler of the user is active on this thread."""
    return _recording.recorded is None and torch._C._autograd._profiler_enabled()


def recorded_history() -> Mapping[str, Any] | None:
    """Return what CUDA's caching allocators have recorded, as a snapshot that PyTorch's memory visualizer reads.

    Returns:
        the snapshot; ``None``: nothing is recorded, since ``torch.cuda.memory._record_memory_history`` is off, or no
        CUDA device is in use.
    """
    if not torch.cuda.is_initialized() or torch.cuda.get_allocator_backend() != "native":  # others have no snapshots
        return None
    snapshot = torch.cuda.memory._snapshot()
    return snapshot if any(snapshot["device_traces"]) else None


_wrapped: list[Callable[[], None]] = []
"""Functions that undo a :func:`wrap_compiled_calls` each."""


def wrap_compiled_calls(around: Callable[[Callable[[], Any], Sequence[Any]], Any]) -> Callable[[], None] | None:
    """Make each call of code that Inductor has compiled go through a function, in all threads.

    Such code allocates without an operation that a dispatch mode sees.

    Args:
        around: called with the call and its arguments, a list that the call clears; returns what the call returns.

    Returns:
        a function that undoes it; ``None`` as long as Inductor has not been imported, so that nothing was compiled.
    """
    emitted: Any = sys.modules.get("torch._inductor.output_code")
    if emitted is None or not hasattr(emitted, "CompiledFxGraph"):  # or is being imported
        return None
    kind = emitted.CompiledFxGraph
    call = kind.__call__

    def call_wrapped(self: Any, inputs: Sequence[Any]) -> Any:
        return around(lambda: call(self, inputs), inputs)

    def undo() -> None:
        kind.__call__ = call
        _wrapped.remove(undo)

    kind.__call__ = call_wrapped
    _wrapped.append(undo)
    return undo


def compiled_calls_are_seen() -> bool:
    """Return whether someone looks at calls of compiled code: :func:`wrap_compiled_calls`, or a profiler."""
    return bool(_wrapped) or torch.autograd.profiler._is_profiler_enabled


def _counts(values: Sequence[Any], position: int) -> tuple[int, int, int]:
    value = values[position]
    storage = value.untyped_storage()
    return sys.getrefcount(value), value._use_count(), torch._C._storage_Use_Count(storage._cdata)


_ALONE = _counts([torch.empty(0)], 0)
# References of the measuring code itself count too, so they are measured rather than assumed.
"""Counted in the same way, for a tensor that nothing but its list refers to."""


def is_sole_reference(values: list[Any], position: int) -> bool:
    """Test for a tensor in a list that nothing else refers to, nor to its memory.

    Args:
        values: the list; no name may refer to the tensor. Views, and tensors that autograd has saved, count.
        position: position of the tensor.
    """
    return _counts(values, position) == _ALONE


def count_sharing(value: torch.Tensor) -> int:
    """Count the tensors that share a tensor's memory, itself among them; those that autograd has saved count."""
    return torch._C._storage_Use_Count(value.untyped_storage()._cdata) - _ALONE[2] + 1
