"""Buffers on the host that hold the values that a device has offloaded.

For an accelerator they are pinned, which is slow: so they are kept from step to step, and one serves many values, one
after another.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Collection, Iterator

import torch

from roundpipe_fx.budget import HostMemoryError, bytes_text
from roundpipe_fx.runtime.pinned_memory import pinned_empty

_RAN_OUT = re.compile("out of memory|allocate memory|not enough memory|no memory|OS call failed")
"""What CUDA, PyTorch's allocators and the operating system say."""


@contextlib.contextmanager
def allocating_on_host(size: int, purpose: str, advice: str) -> Iterator[None]:
    """Context manager that says what memory of the host was for, if it runs out. Other errors pass unchanged.

    Args:
        size: bytes that are allocated.
        purpose: what the memory is for, as the message of an error names it.
        advice: what is left as it is, and what to do; sentences.

    Raises:
        HostMemoryError: the host has no memory for it.
    """
    try:
        # The advice names what to do; the library's own message would only say that an allocation failed.
        yield
    except (RuntimeError, OSError) as error:
        if not _RAN_OUT.search(str(error)):
            raise
        message = f"the host has no memory for {purpose}: allocating {bytes_text(size)} failed. {advice}"
        raise HostMemoryError(message, size) from error


class HostBuffers:
    """Buffers of one device, by size.

    Args:
        device: which copies into them and out of them; they are pinned unless it is the host.

    Attributes:
        bytes: bytes of all of them that exist, in use or not.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes = 0
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, size: int) -> torch.Tensor:
        """A buffer, which must not be in use by a copy.

        Raises:
            HostMemoryError: the host has no memory for it.
        """
        # The last buffer given back is taken first: its pages are most likely mapped and cached.
        free = self._free.get(size)
        if free:
            return free.pop()
        advice = (
            f"Such values have {bytes_text(self.bytes)} already. Give a smaller host_budget, so that more is "
            "recomputed instead, or use a smaller batch."
        )
        with allocating_on_host(size, "values that leave the device", advice):
            buffer = pinned_empty(size, self._device)
        self.bytes += size
        weakref.finalize(buffer, _freed, weakref.ref(self), size).atexit = False
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer. Later copies into it must run after those from it."""
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def keep(self, sizes: Collection[int]) -> None:
        """Free the buffers of other sizes, which a step with other inputs had."""
        self._free = {size: free for size, free in self._free.items() if size in sizes}


def _freed(buffers: weakref.ref[HostBuffers], size: int) -> None:
    owner = buffers()
    if owner is not None:
        owner.bytes -= size
