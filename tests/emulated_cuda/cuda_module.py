"""What a CPU build leaves out of ``torch.cuda``, for the emulated devices."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

__all__ = ["capturing", "device", "emulate", "failing_unregistration"]


def _preloaded() -> ModuleType:
    """The emulator, which was loaded before torch, as a module."""
    path = next((own for own in os.environ.get("LD_PRELOAD", "").split(":") if "device_" in own), None)
    if path is None:
        raise RuntimeError("preload the emulator: LD_PRELOAD=$(python -m tests.emulated_cuda.build)")
    ctypes.CDLL(path)
    spec = importlib.util.spec_from_file_location("emulated_device", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


device = _preloaded()


class _Properties:
    name = "NVIDIA H200"
    major, minor = 9, 0
    multi_processor_count = 132
    max_threads_per_multi_processor = 2048
    gcnArchName = ""
    total_memory = device.capacity()


class _Cudart:
    """Of CUDA's runtime, what registers memory of the host. Two registered ranges share no page.

    Attributes:
        registered: bytes of each range, by address.
        unregistering: what :meth:`cudaHostUnregister` returns or raises instead of unregistering; 0: it unregisters.
    """

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.unregistering: int | Exception = 0

    cudaError = int

    def cudaGetErrorString(self, code: int) -> str:
        return {
            2: "out of memory",
            712: "part or all of the requested memory range is already mapped",
            713: "pointer does not correspond to a registered memory region",
        }[code]

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        end = address + size
        for begin, own in self.registered.copy().items():
            if address < _page_end(begin + own) and begin // mmap.PAGESIZE * mmap.PAGESIZE < end:
                return 712
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if isinstance(self.unregistering, Exception):
            raise self.unregistering
        if not self.unregistering:
            del self.registered[address]
        return self.unregistering


@contextlib.contextmanager
def failing_unregistration(result: int | Exception = 713) -> Iterator[None]:
    """Context manager in which memory of the host stays registered.

    Args:
        result: what ``cudaHostUnregister`` returns, or what its binding raises.
    """
    cudart: Any = torch.cuda.cudart()
    cudart.unregistering = result
    try:
        yield
    finally:
        cudart.unregistering = 0


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Context manager in which a graph is being captured: to synchronize the host, or to query an event, is refused.

    Operators run at once, and what was captured cannot be replayed.
    """
    device.capture(True)
    try:
        yield
    finally:
        device.capture(False)


def _page_end(address: int) -> int:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE


class _Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> _Event:
        return torch.Event.__new__(cls, device="cuda", enable_timing=enable_timing)


def emulate() -> None:
    """Have ``torch.cuda`` speak of the emulated devices, for the rest of the process."""
    cuda: Any = torch.cuda
    private: Any = torch._C
    private._cuda_getCurrentRawStream = lambda index: 0
    private._cuda_exchangeDevice = _exchange
    private._cuda_maybeExchangeDevice = _maybe_exchange
    private._cuda_isCurrentStreamCapturing = device.is_capturing
    private._cuda_setStream = _set_stream
    cudart = _Cudart()
    cuda.cudart = lambda: cudart
    cuda._CudaDeviceProperties = _Properties
    cuda._initialized = True
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda call, **options: call()
    cuda._is_compiled = lambda: True
    cuda._is_in_bad_fork = lambda: False
    cuda._exchange_device = _exchange
    cuda._maybe_exchange_device = _maybe_exchange
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.is_current_stream_capturing = device.is_capturing
    cuda.current_blas_handle = device.use_blas
    cuda.current_device = device.current_device
    cuda.device_count = device.device_count
    cuda.set_device = lambda which: device.set_device(_index(which))
    cuda.get_device_name = lambda which=None: _Properties.name
    cuda.get_device_capability = lambda which=None: (_Properties.major, _Properties.minor)
    cuda.get_device_properties = lambda which=None: _Properties
    cuda.synchronize = lambda which=None: device.synchronize(_index(which))
    cuda.current_stream = _current_stream
    cuda.Event = _Event
    cuda.set_sync_debug_mode = lambda mode: device.refuse_synchronizations(mode in ("error", 2))

    cuda.default_generators = tuple(device.generator(index) for index in range(device.device_count()))
    cuda.get_rng_state = _get_rng_state
    cuda.set_rng_state = _set_rng_state
    cuda.manual_seed = lambda seed: cuda.default_generators[_index()].manual_seed(seed)
    cuda.manual_seed_all = cuda.random.manual_seed_all = _seed_all

    cuda.memory_stats = _memory_stats
    cuda.memory_allocated = lambda which=None: _memory_stats(which)["allocated_bytes.all.current"]
    cuda.max_memory_allocated = lambda which=None: _memory_stats(which)["allocated_bytes.all.peak"]
    cuda.memory_reserved = lambda which=None: _memory_stats(which)["reserved_bytes.all.current"]
    cuda.max_memory_reserved = lambda which=None: _memory_stats(which)["reserved_bytes.all.peak"]
    cuda.memory_stats_as_nested_dict = _nested_memory_stats
    cuda.memory_snapshot = cuda.memory.memory_snapshot = _memory_snapshot
    cuda.memory._snapshot = _unrecorded_snapshot
    cuda.get_allocator_backend = lambda: "native"
    cuda.reset_peak_memory_stats = lambda which=None: device.reset_peak(_index(which))
    cuda.mem_get_info = lambda which=None: (device.capacity() - cuda.memory_reserved(which), device.capacity())
    cuda.empty_cache = device.empty_cache
    torch.UntypedStorage.clone = _cloned_storage  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = _resized_storage  # type: ignore[method-assign]


class _Stream(torch.Stream):
    @property
    def cuda_stream(self) -> int:
        return self.stream_id


def _current_stream(which: Any = None) -> _Stream:
    stream = torch.accelerator.current_stream(torch.device("cuda", _index(which)))
    return _Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    torch.accelerator.set_stream(torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))


def _index(which: Any = None) -> int:
    if isinstance(which, int):
        return which
    index = None if which is None else torch.device(which).index
    return device.current_device() if index is None else index


def _exchange(index: int) -> int:
    before = device.current_device()
    device.set_device(index)
    return before


def _maybe_exchange(index: int) -> int:  # a function of its own: Dynamo knows the two by identity
    before = device.current_device()
    device.set_device(index)
    return before


def _memory_stats(which: Any = None) -> dict[str, int]:
    counters = zip(("allocated", "active", "reserved"), device.counters(_index(which)), strict=True)
    return {
        f"{name}_bytes.all.{what}": size
        for name, sizes in counters
        for what, size in zip(("current", "peak"), sizes, strict=True)
    }


def _nested_memory_stats(which: Any = None) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, size in _memory_stats(which).items():
        name, pool, what = key.split(".")
        nested.setdefault(name, {}).setdefault(pool, {})[what] = size
    return nested


def _unrecorded_snapshot(which: Any = None) -> dict[str, Any]:
    """Nothing records a history here."""
    traces: list[list[Any]] = [[] for _ in range(device.device_count())]
    return {"segments": _memory_snapshot(), "device_traces": traces}


def _memory_snapshot(mempool_id: Any = None) -> list[dict[str, Any]]:
    segments = []
    for number, (index, stream, is_small, size, blocks) in enumerate(device.snapshot()):
        segments.append(
            {
                "device": index,
                "stream": stream,
                "segment_type": "small" if is_small else "large",
                "segment_pool_id": (0, 0),
                "address": number << 40,
                "total_size": size,
                "blocks": [
                    {
                        "address": (number << 40) + at,
                        "size": length,
                        "state": "inactive" if free else "active_allocated",
                    }
                    for at, length, free in blocks
                ],
            }
        )
    return segments


def _get_rng_state(which: Any = "cuda") -> torch.Tensor:
    return torch.cuda.default_generators[_index(which)].get_state()


def _set_rng_state(state: torch.Tensor, which: Any = "cuda") -> None:
    torch.cuda.default_generators[_index(which)].set_state(state)


def _seed_all(seed: int) -> None:
    for generator in torch.cuda.default_generators:
        generator.manual_seed(seed)


_clone_on_host, _resize_on_host = torch.UntypedStorage.clone, torch.UntypedStorage.resize_


def _cloned_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Storages of CUDA's are not made from Python in a CPU build; tensors are."""
    if storage.device.type != "cuda":
        return _clone_on_host(storage)
    original = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return original.clone().untyped_storage()


def _resized_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _resize_on_host(storage, size)
    device.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
    return storage
