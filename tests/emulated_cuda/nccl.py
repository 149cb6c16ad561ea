"""NCCL between processes with emulated devices, by its rules of order:

- an operation runs on a stream of its communicator, after what the current stream had been given when the operation was
  started; ``wait`` makes the current stream wait for it. So what is read too early, and memory that is handed out too
  early, are races;
- two ranks have a communicator in a group, in which their sends and receives run one after another as each of them has
  started them. A send is over once the other rank runs its receive: orders that NCCL would never get through stop here,
  too, until the group's timeout;
- the tensors of an operation are kept until it was waited for; tensors of the CPU are refused.

Gloo carries the bytes, in threads. Unlike NCCL's, ``wait`` blocks the host until they are there.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.emulated_cuda.cuda_module import device

__all__ = ["NAME", "register"]

NAME = "emulated_nccl"

_ACKNOWLEDGED = 1
"""Tag of the receiver's answer; tensors have tag 0."""


def register() -> None:
    """Make the backend known to torch.distributed, as that of CUDA's tensors."""
    dist.Backend.register_backend(NAME, _made, devices=["cuda"])


def _made(store: dist.Store, rank: int, size: int, timeout: timedelta) -> _Group:
    return _Group(store, rank, size, timeout)


class _Communicator:
    """A stream, and a thread that runs one operation after another."""

    def __init__(self) -> None:
        self.stream = torch.Stream("cuda")
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    def start(
        self, name: str, run: Callable[[], None], sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> _Work:
        """Start an operation that reads and writes tensors."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with self.stream:
            device.communicates(name, list(sources), list(targets))
            event = torch.Event("cuda")
            event.record()
        work = _Work(event, [*sources, *targets])
        self._jobs.put(lambda: work.run(run))
        return work


class _Work(dist.Work):
    def __init__(self, event: torch.Event, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self._event, self._kept = event, kept
        self._over, self._error = threading.Event(), None

    def run(self, operation: Callable[[], None]) -> None:
        try:
            operation()
        except BaseException as error:
            self._error = error
        self._over.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        torch.cuda.current_stream().wait_event(self._event)
        self._kept = []
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._over.is_set()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, as one of the host's."""
    assert tensor.is_cuda, "NCCL has no tensors of the CPU"
    assert tensor.is_contiguous(), "NCCL's tensors are contiguous"
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)


class _Group(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._options = SimpleNamespace(_timeout=timeout)
        self._pairs: dict[int, _Communicator] = {}
        self._all: _Communicator | None = None

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=self._options)

    def getBackendName(self) -> str:
        """What torch calls it."""
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """By which traced collectives find it."""
        return self._name

    def _pair(self, peer: int) -> _Communicator:
        if peer not in self._pairs:
            self._pairs[peer] = _Communicator()
        return self._pairs[peer]

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        """Send one tensor; the tag means nothing."""
        (tensor,) = tensors
        sent, answer = _bytes(tensor), torch.zeros(1)

        def run() -> None:
            self._gloo.send([sent], peer, 0).wait()
            self._gloo.recv([answer], peer, _ACKNOWLEDGED).wait()

        return self._pair(peer).start("send", run, tensors, [])

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        """Receive one tensor; the tag means nothing."""
        (tensor,) = tensors
        received, answer = _bytes(tensor), torch.zeros(1)

        def run() -> None:
            self._gloo.recv([received], peer, 0).wait()
            self._gloo.send([answer], peer, _ACKNOWLEDGED).wait()

        return self._pair(peer).start("recv", run, [], tensors)

    def _together(
        self, name: str, run: Callable[[], Any], sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> _Work:
        if self._all is None:
            self._all = _Communicator()
        return self._all.start(name, lambda: run().wait(), sources, targets)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        """Reduce in place."""
        parts = [_bytes(tensor) for tensor in tensors]
        return self._together("all_reduce", lambda: self._gloo.allreduce(parts, options), tensors, tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        """Overwrite with the root's."""
        parts, is_root = [_bytes(tensor) for tensor in tensors], options.rootRank == self.rank()
        run = lambda: self._gloo.broadcast(parts, options)  # noqa: E731
        return self._together("broadcast", run, tensors if is_root else [], [] if is_root else tensors)

    def scatter(self, parts: list[torch.Tensor], wholes: list[list[torch.Tensor]], options: Any) -> _Work:
        """Each rank gets one of the root's tensors."""
        sources = [tensor for whole in wholes for tensor in whole]
        into, of_all = [*map(_bytes, parts)], [[_bytes(tensor) for tensor in whole] for whole in wholes]
        return self._together("scatter", lambda: self._gloo.scatter(into, of_all, options), sources, parts)

    def _allgather_base(self, whole: torch.Tensor, part: torch.Tensor, options: Any) -> _Work:
        into, own = _bytes(whole), _bytes(part)
        return self._together("all_gather", lambda: self._gloo._allgather_base(into, own, options), [part], [whole])

    def _reduce_scatter_base(self, part: torch.Tensor, whole: torch.Tensor, options: Any) -> _Work:
        into, of_all = _bytes(part), _bytes(whole)
        run = lambda: self._gloo._reduce_scatter_base(into, of_all, options)  # noqa: E731
        return self._together("reduce_scatter", run, [whole], [part])

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def allgather_into_tensor_coalesced(
        self, wholes: list[torch.Tensor], parts: list[torch.Tensor], options: Any
    ) -> _Work:
        """Gather, as traced collectives and DTensors do."""
        (whole,), (part,) = wholes, parts
        return self._allgather_base(whole, part, options)

    def reduce_scatter_tensor_coalesced(
        self, parts: list[torch.Tensor], wholes: list[torch.Tensor], options: Any
    ) -> _Work:
        """Reduce to each rank's part, as traced collectives and DTensors do."""
        (part,), (whole,) = parts, wholes
        return self._reduce_scatter_base(part, whole, options)

    def barrier(self, *args: Any, **options: Any) -> Any:
        """Wait for all ranks."""
        return self._gloo.barrier()
