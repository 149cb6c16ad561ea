"""Peaks, measured by what shares no code with the planner nor with ``roundpipe_fx.measure_peak``.

Two meters. ``StoragePeak`` sees the storages of results as operations hand them out, on every thread that the mode
reaches; ``AllocatorPeak`` reads the profiler's record of what the CPU's allocator gave and got back on this thread,
what kernels use inside themselves included.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["AllocatorPeak", "StoragePeak"]


class StoragePeak(TorchDispatchMode):
    """While entered, counts the bytes of storages that operations make and that still live.

    Attributes:
        live: bytes at the moment.
        peak: bytes at most.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """``torch.compile`` skips frames under other modes."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()
        self._lock = threading.RLock()  # workers share it, and finalizers run inside an addition

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        with self._lock:
            for storage in _storages(result):
                key, size = storage._cdata, storage.nbytes()
                if key in known or key in self._seen or not size:
                    continue
                self._seen.add(key)
                weakref.finalize(storage, self._gone, key, size)
                self.live += size
                self.peak = max(self.peak, self.live)
        return result

    def _gone(self, key: int, size: int) -> None:
        with self._lock:
            self._seen.discard(key)
            self.live -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [
        value.untyped_storage()
        for value in tree_leaves(tree)
        if isinstance(value, torch.Tensor)
        and not isinstance(value, FakeTensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
    ]


class AllocatorPeak:
    """What the CPU's allocator gave this thread and had not got back, at most.

    Attributes:
        peak: bytes; there once it is left.
    """

    def __enter__(self) -> AllocatorPeak:
        self.peak = 0
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        self._profiler.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._profiler.__exit__(*exc)
        events: list[tuple[int, int, int]] = []
        pending = list(self._profiler.profiler.kineto_results.experimental_event_tree())
        while pending:
            event = pending.pop()
            pending.extend(event.children)
            if event.tag == torch._C._profiler._EventType.Allocation:
                fields = event.typed[1]
                events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        live, given = 0, {}
        for _, place, size in sorted(events, key=lambda event: event[0]):
            if size > 0:
                given[place] = size
                live += size
                self.peak = max(self.peak, live)
            else:
                live -= given.pop(place, 0)  # what was there before is none of the step's
