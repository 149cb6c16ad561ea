"""Measures peak memory, on the CPU and on CUDA."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self

import torch

from roundpipe_fx.torch_private import (
    ForkedLock,
    ProfiledMemory,
    TorchDispatchMode,
    conjugates_resolved,
    profile_memory,
    tree_leaves,
)

__all__ = ["measure_peak"]


class measure_peak:
    """Context manager that measures peak memory: bytes beyond those allocated when it was entered.

    ::

        with roundpipe_fx.measure_peak() as peak:
            model(x).sum().backward()
        print(peak.bytes)

    On the CPU, the live bytes of all tensor storages that operations allocate or that are resized (as FSDP2 resizes
    those of gathered parameters), each storage once, and workspaces of kernels; memory allocated by compiled code
    (Inductor) is not counted. A profiler cannot run at the same time. On CUDA, the counters of the caching allocator:
    ``max_memory_allocated()`` minus ``memory_allocated()`` at the beginning, on the given device.

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
_resizing = ForkedLock()


def _resize_counted(storage: torch.UntypedStorage, size: int) -> Any:
    """``UntypedStorage.resize_`` while something is measured: it is no operation that a dispatch mode sees."""
    before = storage.nbytes()
    resized = super(torch.UntypedStorage, storage).resize_(size)
    for storages in dict.fromkeys(_measuring):  # a worker of a pipeline enters the mode once more
        storages._resize(storage, before)
    return resized


class _LiveStorages(TorchDispatchMode):
    """Counts the bytes of live storages that operations allocate."""

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

    def __enter__(self) -> Self:
        with _resizing:
            _measuring.append(self)
            torch.UntypedStorage.resize_ = _resize_counted  # type: ignore[assignment, method-assign]
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        with _resizing:
            _measuring.remove(self)
            if not _measuring:
                del torch.UntypedStorage.resize_  # it is the base class's
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Storages of operands were allocated before: by code that is not measured, or they have been counted.
        known = {
            value.untyped_storage()._cdata
            for value in tree_leaves((args, kwargs))
            if isinstance(value, torch.Tensor) and value.layout is torch.strided
        }
        with conjugates_resolved():
            result = profile_memory(lambda: func(*args, **kwargs), "cpu", self._noting())
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self._add(value.untyped_storage(), known)
        return result

    def _noting(self) -> Callable[[ProfiledMemory], None]:
        before = self.live

        def note(memory: ProfiledMemory) -> None:
            with self._lock:
                self.peak = max(self.peak, before + memory.peak)

        return note

    def _add(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        key = storage._cdata
        if key in self._sizes or key in known or storage.device.type != "cpu":
            return
        size = storage.nbytes()
        with self._lock:
            self._sizes[key] = size
            self.live += size
            self.peak = max(self.peak, self.live)
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
            self.live += change
            self.peak = max(self.peak, self.live)
        if new:
            weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        with self._lock:
            self.live -= self._sizes.pop(key, 0)
