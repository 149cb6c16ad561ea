"""Buffers on the host that hold the values that a device has offloaded.

On an accelerator they are pinned, which is slow, and which PyTorch's allocator would do anew while copies of an earlier
microbatch are still under way: so they are kept from step to step, and one serves many values, one after another.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from roundpipe_fx.budget import HostMemoryError, bytes_text

__all__ = ["HostBuffers"]


class HostBuffers:
    """Buffers of one device, by size.

    Args:
        pinned: whether they are in pinned memory.

    Attributes:
        bytes: bytes of all of them, in use or not.
    """

    def __init__(self, pinned: bool) -> None:
        self.bytes = 0
        self._pinned = pinned
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, size: int) -> torch.Tensor:
        """A buffer, which must not be in use by a copy.

        Args:
            size: its bytes.

        Raises:
            HostMemoryError: the host has no memory for it.
        """
        free = self._free.get(size)
        if free:
            return free.pop()
        try:
            made = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        except RuntimeError as error:
            raise HostMemoryError(
                f"the host has no memory for values that leave the device: allocating {bytes_text(size)} failed, "
                f"beside the {bytes_text(self.bytes)} that they have already. Give a smaller host_budget, so that "
                "more is recomputed instead, or use a smaller batch.",
                self.bytes + size,
            ) from error
        self.bytes += size
        return made

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer. Later copies into it must run after those from it."""
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def keep(self, sizes: Collection[int]) -> None:
        """Free the buffers of other sizes, which a step with other inputs had."""
        for size in self._free.keys() - set(sizes):
            self.bytes -= size * len(self._free.pop(size))
