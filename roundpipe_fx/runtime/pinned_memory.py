"""Pinned memory of the host, from and to which an accelerator copies beside its work.

PyTorch's allocator of pinned memory rounds up to powers of two: a weight of 1.1 GiB takes 2 GiB. So pages are taken
from the operating system instead, registered with CUDA (``cudaHostRegister``), and unregistered when the last tensor
in them is gone: at once if the device is idle, else when other pages are registered or a step has ended. Tensors die
anywhere, in the middle of a CUDA graph's capture too, so nothing waits for the device there. Pages that cannot be
unregistered stay for good: CUDA still knows their addresses, which must not become those of other memory.

Pages for gradients are used again instead, since each step has gradients of the same sizes::

    free ── empty_like ──▶ hold a gradient ── it dies ──▶ given back ── settle waits for copies ──▶ free
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices."""


def pinned_bytes(size: int, device_type: str) -> int:
    """Bytes of the host that pinned memory takes.

    Args:
        size: bytes that are asked for.
        device_type: of the device that copies; ``"cpu"``: it is ordinary memory.
    """
    return size if device_type == "cpu" else -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def pinned_empty(size: int, device: torch.device) -> torch.Tensor:
    """Bytes that copies of a device overlap with its work; ordinary memory if the device is the host.

    Args:
        size: how many, at least one.

    Raises:
        RuntimeError: the host has no memory for it, or it cannot be pinned.
        OSError: the host has no memory for it.
    """
    if device.type == "cpu":
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    pages = _Pages(size, device)
    return torch.frombuffer(pages.lease(_retire, pages), dtype=torch.uint8)


def pinned_copy(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor's copy in pinned memory, which it shares with no other tensor.

    Args:
        value: on the host, and all of its memory.

    Raises:
        RuntimeError: as of :func:`pinned_empty`.
        OSError: as of :func:`pinned_empty`.
    """
    memory = pinned_empty(value.untyped_storage().nbytes(), device)
    return _within(memory, value).copy_(value)


class PinnedGradients:
    """Memory for gradients that leave a device. Each step has the same ones, and to register pages takes about as long
    as to copy them: so they are used again once the gradients in them are gone.

    Args:
        device: which copies them. Copies into the memory must be issued on the same stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, deque[_Pages]] = {}
        self._given: deque[_Pages] = deque()
        self._lent = 0
        # Not at exit: CUDA's context may be gone by then, and the driver unpins memory anyway.
        weakref.finalize(self, _retire_all, self._free, self._given).atexit = False

    def settle(self) -> None:
        """Called in the caller's thread before a step: wait for copies of earlier gradients, which the user may have
        begun (``gradient.to(device, non_blocking=True)``). Memory of such gradients is used again in the step."""
        count = len(self._given)
        if count or self._lent:
            _synchronize()
        # Only those that were given back before the wait: copies of later ones may still run.
        for _ in range(count):
            self._put(self._given.popleft())

    def empty_like(self, gradient: torch.Tensor) -> torch.Tensor:
        """A tensor on the host for a copy of a gradient.

        Raises:
            RuntimeError: as of :func:`pinned_empty`.
            OSError: as of :func:`pinned_empty`.
        """
        # Empty tensors have no memory to register.
        if not gradient.numel():
            return torch.empty_like(gradient, device="cpu")
        layout = torch.empty_like(gradient, device="meta")
        free = self._free.get(layout.nbytes)
        if not free:
            # What a step gives back was there when it began, or no one else has seen it: settle has waited for readers.
            # Sizes repeat from step to step, so after the first step nothing is registered any more.
            for _ in range(len(self._given)):
                self._put(self._given.popleft())
            free = self._free.get(layout.nbytes)
        pages = free.popleft() if free else _Pages(layout.nbytes, self._device)
        self._lent += 1
        lease = pages.lease(_give_back, weakref.ref(self), pages)
        return _within(torch.frombuffer(lease, dtype=torch.uint8), layout)

    def give(self, pages: _Pages) -> None:
        """Take pages back that no tensor lies in."""
        self._lent -= 1
        self._given.append(pages)

    def _put(self, pages: _Pages) -> None:
        self._free.setdefault(pages.size, deque()).append(pages)


def _give_back(gradients: weakref.ref[PinnedGradients], pages: _Pages) -> None:
    owner = gradients()
    if owner is not None:
        owner.give(pages)
    else:
        _retire(pages)


class _Pages:
    """Pages that are registered with CUDA, for all of its devices. A process that is forked shares them: of private
    ones that are pinned it would be given copies. They are the parent's there, which alone unregisters them.

    Args:
        device: whose context is used.

    Raises:
        RuntimeError: they cannot be registered.
        OSError: the host has no memory for them.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        # Registering waits for the device, so pages that wait to be unregistered are done at the same time.
        _release_retired()
        self.size = size
        self.device = device
        self.process = os.getpid()
        self._memory = mmap.mmap(-1, size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        is_unknown = True
        # From the call on until its result is known, CUDA may or may not know the address.
        try:
            with torch.cuda.device(device):
                cudart = torch.cuda.cudart()
                code = cudart.cudaHostRegister(self._address, pinned_bytes(size, device.type), _PORTABLE)
                is_unknown = False
                if int(code) != 0:
                    _forget_error(device)
                    raise RuntimeError(f"cudaHostRegister of {size} bytes: {cudart.cudaGetErrorString(code)}")
        except BaseException:
            if is_unknown:  # whether they are registered, as after an interrupt
                _kept.append(self)
            raise
        _devices.add(device)

    def lease(self, when_over: Callable[..., object], *args: object) -> ctypes.Array[ctypes.c_char]:
        """A buffer in the pages.

        Args:
            when_over: called when the buffer, and every tensor in it, is gone.
        """
        buffer = (ctypes.c_char * self.size).from_buffer(self._memory)
        weakref.finalize(buffer, when_over, *args).atexit = False
        return buffer

    def unregister(self) -> None:
        """Unregister the pages, which nothing reads any more. If that fails they stay for good."""
        try:
            with torch.cuda.device(self.device):
                cudart = torch.cuda.cudart()
                code = cudart.cudaHostUnregister(self._address)
                if int(code) == 0:
                    return
                _forget_error(self.device)
                failure = cudart.cudaGetErrorString(code)
        except Exception as error:  # tensors die where nothing may be raised
            failure = str(error)
        _kept.append(self)
        log.warning("%d bytes of pinned memory stay allocated: cudaHostUnregister: %s", self.size, failure)


_devices: set[torch.device] = set()
"""Devices that have registered pages."""
_retired: deque[_Pages] = deque()
"""Pages in which no tensor lies, and which copies may still read."""
_kept: list[_Pages] = []
"""Pages that CUDA may know of for good."""


def release_idle_pages() -> None:
    """Unregister pages that no tensor lies in, unless a device is still at work. Nothing waits."""
    if _retired and _is_idle():
        _unregister(len(_retired))


def _release_retired() -> None:
    count = len(_retired)
    if count:
        _synchronize()
        _unregister(count)


# The number is fixed beforehand: other threads may append meanwhile.
def _unregister(count: int) -> None:
    for _ in range(count):
        try:
            pages = _retired.popleft()
        except IndexError:  # another thread was faster
            return
        pages.unregister()


def _retire(pages: _Pages) -> None:
    if sys.is_finalizing() or pages.process != os.getpid():  # the driver unpins what a process leaves
        return
    _retired.append(pages)
    release_idle_pages()


def _retire_all(free: dict[int, deque[_Pages]], returned: deque[_Pages]) -> None:
    for pages in [*returned, *(pages for free_pages in free.values() for pages in free_pages)]:
        _retire(pages)


def _is_idle() -> bool:
    """Test for devices that have done all their work, as far as their current and default streams tell."""
    if not torch.cuda.is_initialized():
        return True
    try:
        # Asking a stream during a capture would end the capture with an error.
        if torch.cuda.is_current_stream_capturing():
            return False
        return all(stream.query() for index in _indices_in_use() for stream in _streams_of(index))
    except (RuntimeError, AttributeError):  # a device that has failed, or streams that cannot be asked
        return False


def _streams_of(index: int) -> tuple[torch.Stream, torch.Stream]:
    """This thread's current stream of a device, and the device's default one."""
    current = torch.accelerator.current_stream(torch.device("cuda", index))
    return current, torch.Stream(stream_id=0, device_index=index, device_type=current.device_type)


def _synchronize() -> None:
    """Wait for every device that may read the host's memory: what is pinned is pinned for all of them."""
    for index in _indices_in_use():
        torch.cuda.synchronize(index)


def _indices_in_use() -> list[int]:
    """Devices on which something was allocated; to speak to others would initialize them."""
    if not torch.cuda.is_initialized():
        return []
    registering = {device.index or 0 for device in _devices}
    allocating = {index for index in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(index)}
    return sorted(registering | allocating)


def _forget_error(device: torch.device) -> None:
    """CUDA keeps a thread's last error, which the check after the next kernel would take for that kernel's."""
    # A kernel is launched only to clear the error.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


def _within(memory: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
    """A tensor in so much memory, with the shape, the strides and the dtype of another one."""
    return torch.empty(0, dtype=layout.dtype).set_(memory.untyped_storage(), 0, layout.shape, layout.stride())
