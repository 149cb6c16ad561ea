"""Pinned memory of the host, from and to which an accelerator copies beside its work.

PyTorch's allocator of pinned memory rounds up to powers of two: a weight of 1.1 GiB takes 2 GiB. So pages are taken
from the operating system instead, registered with CUDA (``cudaHostRegister``), and unregistered when the last tensor
in them is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import weakref
from typing import ClassVar

import torch

__all__ = ["PinnedGradients", "pinned_bytes", "pinned_copy", "pinned_empty"]

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
        device: which copies.

    Raises:
        RuntimeError: the host has no memory for it, or it cannot be pinned.
        OSError: the host has no memory for it.
    """
    if device.type == "cpu":
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(_Pages.registered(size, device), dtype=torch.uint8)


def pinned_copy(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor's copy in pinned memory, which it shares with no other tensor.

    Args:
        value: on the host, and all of its memory.
        device: which copies it.

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
        self._free: dict[int, list[_Pages]] = {}

    def empty_like(self, gradient: torch.Tensor) -> torch.Tensor:
        """A tensor on the host for a copy of a gradient.

        Raises:
            RuntimeError: as of :func:`pinned_empty`.
            OSError: as of :func:`pinned_empty`.
        """
        if not gradient.numel():
            return torch.empty_like(gradient, device="cpu")
        like = torch.empty_like(gradient, device="meta")
        free = self._free.get(like.nbytes)
        pages = free.pop() if free else _Pages.registered(like.nbytes, self._device)
        lease = (ctypes.c_char * like.nbytes).from_buffer(pages)
        weakref.finalize(lease, _give_back, weakref.ref(self), pages).atexit = False
        return _within(torch.frombuffer(lease, dtype=torch.uint8), like)

    def give(self, pages: _Pages) -> None:
        """Take pages back that no tensor lies in."""
        self._free.setdefault(len(pages), []).append(pages)


def _give_back(gradients: weakref.ref[PinnedGradients], pages: _Pages) -> None:
    owner = gradients()
    if owner is not None:
        owner.give(pages)


class _Pages(mmap.mmap):
    """Pages that are registered with CUDA as long as they exist. A process that is forked shares them: of private ones
    that are pinned it would be given copies."""

    _address: int | None = None
    _devices: ClassVar[set[torch.device]] = set()

    @classmethod
    def registered(cls, size: int, device: torch.device) -> _Pages:
        """So many bytes, for all CUDA devices. The context of ``device`` is used."""
        made = cls(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(made))
        with torch.cuda.device(device):
            cudart = torch.cuda.cudart()
            code = cudart.cudaHostRegister(address, pinned_bytes(size, device.type), _PORTABLE)
            if int(code) != 0:
                _forget_error(device)
                raise RuntimeError(f"cudaHostRegister of {size} bytes: {cudart.cudaGetErrorString(code)}")
        made._address = address
        cls._devices.add(device)
        return made

    def __del__(self) -> None:
        if self._address is None or sys.is_finalizing():  # the driver unpins what a process leaves
            return
        try:
            for device in self._devices:
                torch.cuda.synchronize(device)  # a step has waited for its own copies, but others may be under way
        finally:
            torch.cuda.cudart().cudaHostUnregister(self._address)


def _forget_error(device: torch.device) -> None:
    """CUDA keeps a thread's last error, which the check after the next kernel would take for that kernel's."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


def _within(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor in so much memory, with the shape, the strides and the dtype of another one."""
    return torch.empty(0, dtype=like.dtype).set_(memory.untyped_storage(), 0, like.shape, like.stride())
