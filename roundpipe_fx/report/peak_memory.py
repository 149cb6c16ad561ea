"""Measures peak memory, on the CPU and on CUDA."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from roundpipe_fx.torch_private import (
    Allocation,
    ForkedLock,
    ProfiledMemory,
    TorchDispatchMode,
    WithoutStorage,
    active_dispatch_modes,
    conjugates_resolved,
    profile_memory,
    record_allocations,
    tree_leaves,
    wrap_compiled_calls,
)


class measure_peak:
    """Context manager that measures peak memory: bytes beyond those allocated when it was entered.

    ::

        with roundpipe_fx.measure_peak() as peak:
            model(x).sum().backward()
        print(peak.bytes)

    On the CPU, the live bytes of all tensor storages that operations allocate or that are resized (as FSDP2 resizes
    those of gathered parameters), each storage once, workspaces of kernels, and what code that Inductor has compiled
    allocates. Worker threads of a pipeline count. A profiler cannot run at the same time: the first operation raises an
    error. On CUDA, the counters of the caching allocator: ``max_memory_allocated()`` minus ``memory_allocated()`` at
    the beginning, on the given device.

    Args:
        device: ``"cpu"`` or a CUDA device; ``None``: CUDA if it is in use, else the CPU.

    Attributes:
        bytes: the peak in bytes; final after the block has been left.
        current: bytes allocated in the block and not freed yet.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
        self.device = torch.device(device)
        self._storages = _LiveStorages()
        self._start = 0
        self._peak: int | None = None

    @property
    def bytes(self) -> int:
        """The peak in bytes."""
        if self._peak is not None:
            return self._peak
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._start
        return self._storages.peak

    @property
    def current(self) -> int:
        """Bytes allocated in the block and not freed yet."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) - self._start
        return self._storages.live

    def __enter__(self) -> measure_peak:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        else:
            self._storages.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        else:
            self._storages.__exit__(*exc)
        self._peak = self.bytes


_measuring: list[_LiveStorages] = []
_patching = ForkedLock()
_unwrap: list[Callable[[], None]] = []
"""Undoes what makes calls of compiled code count."""


def _count_compiled_calls() -> None:
    """Make calls of compiled code count, once there may be some; :data:`_patching` is held."""
    if not _unwrap:
        undo = wrap_compiled_calls(_call_counted)
        if undo is not None:
            _unwrap.append(undo)


def _resize_counted(storage: torch.UntypedStorage, size: int) -> Any:
    """``UntypedStorage.resize_`` while something is measured: it is no operation that a dispatch mode sees."""
    before = storage.nbytes()
    resized = super(torch.UntypedStorage, storage).resize_(size)
    for storages in dict.fromkeys(_measuring):  # a worker of a pipeline enters the mode once more
        storages._resize(storage, before)
    return resized


@dataclass(eq=False)
class _CompiledCall:
    """A call of code that Inductor has compiled.

    Attributes:
        counted_by: what counts its allocations.
        freed: bytes of the storages of each of them that it frees.
        ended: when it returned; ``None``: it runs.
        allocations: the allocator's record; ``None``: it is not known yet.
    """

    counted_by: list[_LiveStorages]
    freed: dict[_LiveStorages, list[int]] = field(default_factory=dict)
    ended: float | None = None
    allocations: Sequence[Allocation] | None = None

    def see(self, allocations: Sequence[Allocation]) -> None:
        """Note the allocator's record, which may come after the end."""
        self.allocations = allocations
        self.count()

    def end(self) -> None:
        """Note that it has returned."""
        self.ended = time.perf_counter()
        self.count()

    def count(self) -> None:
        """Count what it allocated and freed meanwhile, once it has returned and that is known."""
        if self.ended is not None and self.allocations is not None:
            for storages in self.counted_by:
                storages._count(self.allocations, self.freed.get(storages, ()), self.ended)


class _CurrentCall(threading.local):
    compiled: _CompiledCall | None = None


_current = _CurrentCall()


def _call_counted(run: Callable[[], Any], inputs: Sequence[Any]) -> Any:
    """Call compiled code, which allocates without an operation that a dispatch mode sees, and count it."""
    # Calls of compiled code may be nested; the outermost one's record has everything.
    active = dict.fromkeys(active_dispatch_modes())
    counted_by = [mode for mode in active if isinstance(mode, _LiveStorages)]
    if not counted_by or _current.compiled is not None:
        return run()
    # The call clears the list, and other storages may come to lie where those of the inputs were.
    storages_of_inputs = [weakref.ref(value.untyped_storage()) for value in inputs if _has_storage(value)]
    _current.compiled = call = _CompiledCall(counted_by)
    for storages in counted_by:
        storages._open_log()
    try:
        result = record_allocations(run, call.see)
    except BaseException:
        call.see(())
        raise
    finally:
        _current.compiled = None
        call.end()
        for storages in counted_by:
            for size in call.freed.get(storages, ()):
                storages._change(-size)
    # Outputs that share memory with inputs are no allocations.
    input_keys = {storage._cdata for reference in storages_of_inputs if (storage := reference()) is not None}
    for value in filter(_has_storage, tree_leaves(result)):
        for storages in counted_by:
            storages._add(value.untyped_storage(), input_keys)
    return result


def _has_storage(value: Any) -> bool:
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return strided and not isinstance(value, WithoutStorage)


class _LiveStorages(TorchDispatchMode):
    """Counts the bytes of live storages that operations allocate.

    While compiled code runs, whose allocations are known in full only later, changes are logged, and the peak is that
    of all logs merged by time.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # torch.compile skips frames under other modes

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        # Workers of a pipeline run under the mode of their caller; a finalizer may run inside an addition.
        self._lock = ForkedLock()
        self._sizes: dict[int, int] = {}
        self._uncounted = 0
        self._log: list[tuple[float, int]] = []
        self._before_log = 0

    def __enter__(self) -> Self:
        with _patching:
            _measuring.append(self)
            torch.UntypedStorage.resize_ = _resize_counted  # type: ignore[assignment, method-assign]
            _count_compiled_calls()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        with _patching:
            _measuring.remove(self)
            if not _measuring:
                del torch.UntypedStorage.resize_  # it is the base class's
                while _unwrap:
                    _unwrap.pop()()
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _current.compiled is not None:
            return func(*args, **kwargs)
        if not _unwrap:
            with _patching:
                _count_compiled_calls()
        # Storages of operands were allocated before: by code that is not measured, or they have been counted.
        argument_keys = {value.untyped_storage()._cdata for value in tree_leaves((args, kwargs)) if _has_storage(value)}
        with conjugates_resolved():
            result = profile_memory(lambda: func(*args, **kwargs), "cpu", self._note_allocations())
        for value in filter(_has_storage, tree_leaves(result)):
            self._add(value.untyped_storage(), argument_keys)
        return result

    def _note_allocations(self) -> Callable[[ProfiledMemory], None]:
        before = self.live

        def note(memory: ProfiledMemory) -> None:
            with self._lock:
                self.peak = max(self.peak, before + memory.peak)

        return note

    def _add(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        key = storage._cdata
        # A storage is counted once, by identity; its finalizer takes it off again.
        if key in self._sizes or key in known or storage.device.type != "cpu":
            return
        size = storage.nbytes()
        with self._lock:
            self._sizes[key] = size
            self._change(size)
        weakref.finalize(storage, self._remove, key)

    def _resize(self, storage: torch.UntypedStorage, before: int) -> None:
        """Count a storage that had ``before`` bytes, those that were allocated earlier with what they have more now."""
        if storage.device.type != "cpu":
            return
        key = storage._cdata
        with self._lock:
            new = key not in self._sizes
            change = storage.nbytes() - before
            self._sizes[key] = self._sizes.get(key, 0) + change
            self._change(change)
        if new:
            weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        call = _current.compiled
        with self._lock:
            size = self._sizes.pop(key, 0)
            if call is not None and self in call.counted_by:
                call.freed.setdefault(self, []).append(size)  # the allocator's record says when
            else:
                self._change(-size)

    def _change(self, size: int) -> None:
        with self._lock:
            self.live += size
            if self._uncounted:
                self._log.append((time.perf_counter(), size))
            else:
                self.peak = max(self.peak, self.live)

    def _open_log(self) -> None:
        """Begin a call of compiled code."""
        with self._lock:
            if not self._uncounted:
                self._before_log = self.live
            self._uncounted += 1

    def _count(self, allocations: Sequence[Allocation], freed: Sequence[int], ended: float) -> None:
        """Count what a call of compiled code held while it ran.

        Args:
            allocations: the allocator's record of the call.
            freed: bytes of counted storages that the call freed. Others that it freed but has not allocated were there
                before the measurement.
            ended: when it returned. What it leaves is counted from then on as other storages are.
        """
        # A free in the record is either of a storage that finalizers will report (`counted`) or of a temporary of the
        # call (`local`).
        local, counted = Counter[int](), Counter(freed)
        held = 0
        with self._lock:
            for allocation in allocations:
                size = allocation.cpu
                if size > 0:
                    local[size] += 1
                else:
                    source = counted if counted[-size] else local
                    if not source[-size]:
                        continue
                    source[-size] -= 1
                held += size
                self._log.append((min(allocation.seconds, ended), size))
            # At the end of the call everything that it holds is taken back: its outputs are counted as storages from
            # here on.
            self._log.append((ended, -held))
            self._uncounted -= 1
            if not self._uncounted:
                self._count_log()

    def _count_log(self) -> None:
        level = self._before_log
        # All logs merged by time: several workers may have run compiled code at once.
        for _, size in sorted(self._log, key=lambda entry: entry[0]):
            level += size
            self.peak = max(self.peak, level)
        self._log.clear()
