"""Memory that libraries keep: the workspaces of cuBLAS.

cuBLAS has a handle for each thread, and PyTorch gives it a workspace for each handle and stream: 32 MiB on Hopper. The
first product of a thread on a stream takes it from the caching allocator, and it is never freed. It is no value of the
step and no workspace of one operator, so no plan has it::

    thread              stream      when its workspace comes
    the caller's        current     a graph is compiled
    autograd's          current     likewise, in a small backward
    a worker's          compute     the worker starts

So each thread multiplies small matrices on each stream that it is going to use, before a step begins. What that takes
is the libraries' own: it is reported beside the plan's peak, and is not free when a budget is derived from free memory.
A thread or stream that is not known in advance is met when it first runs a program.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from roundpipe_fx.runtime.streams import on_stream
from roundpipe_fx.torch_private import without_modes

_SIZE = 16
"""Rows and columns of a matrix: enough that a product with a bias is one of cuBLASLt."""
_DETERMINISTIC = (":4096:8", ":16:8")
"""Settings with which PyTorch takes products of cuBLAS to be deterministic."""

_OF_HOPPER = 32 << 20
_OF_OTHERS = (8 << 20) + (128 << 10)
"""Bytes of a workspace of cuBLAS, as PyTorch chooses them."""


class _Touched(threading.local):
    """(Device, stream) that this thread has multiplied on."""

    def __init__(self) -> None:
        self.streams: set[tuple[int | None, int]] = set()


_touched = _Touched()
_kept: Counter[torch.device] = Counter()
_touching = threading.Lock()


def library_bytes(device: torch.device) -> int:
    """Bytes of a device that libraries have been seen to keep."""
    return _kept[_indexed(device)] if device.type == "cuda" else 0


def expected_library_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that libraries will keep for a step's first thread, if they keep none yet."""
    if library_bytes(device):
        return 0
    major, _ = torch.cuda.get_device_capability(device)
    return _OF_HOPPER if major >= 9 else _OF_OTHERS


def touch_libraries(*streams: torch.Stream) -> None:
    """Have libraries allocate what they keep for this thread and some streams, unless they have.

    Args:
        streams: of any devices; only those of CUDA count.
    """
    for stream in streams:
        key = (stream.device.index, stream.stream_id)
        if stream.device.type != "cuda" or key in _touched.streams:
            continue
        if torch.cuda.is_current_stream_capturing():  # its allocations would be the captured graph's
            continue
        with _touching, without_modes(), torch.no_grad(), on_stream(stream):
            before = torch.cuda.memory_allocated(stream.device)
            _multiply(stream.device)
            _kept[stream.device] += max(torch.cuda.memory_allocated(stream.device) - before, 0)
        _touched.streams.add(key)


def touch_libraries_in_backward(*streams: torch.Stream) -> None:
    """The same for the thread in which autograd runs backwards of the streams' device.

    The small backward begins in a thread of its own, where neither hooks nor transforms of the caller's are active.

    Args:
        streams: of one device; must be those that will be current, or used, in the backward.
    """
    streams = tuple(stream for stream in streams if stream.device.type == "cuda")
    if not streams or torch.cuda.is_current_stream_capturing():
        return

    def run() -> None:
        root = torch.zeros((), device=streams[0].device, requires_grad=True)
        torch.autograd.grad(_Touching.apply(root, streams), root)

    with ThreadPoolExecutor(1, "roundpipe_fx libraries") as thread:
        thread.submit(run).result()


def _multiply(device: torch.device) -> None:
    torch.cuda.current_blas_handle()  # with its workspace
    is_deterministic = os.environ.get("CUBLAS_WORKSPACE_CONFIG") in _DETERMINISTIC
    if torch.are_deterministic_algorithms_enabled() and not is_deterministic:
        return  # a product would warn, or raise, though the model may have none
    matrix = torch.zeros(_SIZE, _SIZE, device=device)
    torch.mm(matrix, matrix)
    torch.addmm(matrix[0], matrix, matrix)


def _indexed(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


class _Touching(torch.autograd.Function):
    """A function whose backward touches the libraries."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, streams: Sequence[torch.Stream]) -> torch.Tensor:
        """The root's value."""
        ctx.touch = lambda: touch_libraries(*streams)
        return root.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient itself."""
        touch: Callable[[], None] = ctx.touch
        touch()
        return gradients[0], None
