"""A simulation of CUDA's caching allocator: the bytes that it counts for each request.

The allocator keeps freed blocks and returns the smallest one that a request fits into. The remainder is split off, but
for requests above 1 MiB only if it is more than 1 MiB. Otherwise the whole block is handed out, and counted in
``memory_allocated``: up to 1 MiB more per tensor than was requested. Which blocks exist depends on all previous
requests, so these have to be followed in order.

Follows PyTorch's ``c10/cuda/CUDACachingAllocator.cpp`` with default settings. Each stream has its own blocks; a block
that two streams use is assumed to be free for its own stream when the host frees it, though it can be later. With
``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` every remainder is split off.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

ROUNDED_TO = 512
"""Every size is rounded up to a multiple of this many bytes."""

_MIB = 1 << 20
_SMALL = _MIB
_SMALL_SEGMENT, _SEGMENT, _OWN_SEGMENT_FROM, _OWN_SEGMENT_ROUNDED_TO = 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB


class MemorySegment(NamedTuple):
    """Memory that the allocator has taken from the device.

    Attributes:
        is_small: whether it is for requests of up to 1 MiB.
        blocks: bytes of each block in order, and whether it is free.
    """

    is_small: bool
    blocks: tuple[tuple[int, bool], ...]


class History(NamedTuple):
    """Free segments that earlier work has left when a step begins.

    Attributes:
        segments: segments of the step's own stream.
        has_inputs: whether the inputs of the step are among the blocks in use.
    """

    segments: tuple[MemorySegment, ...] = ()
    has_inputs: bool = False


NO_HISTORY = History()


@dataclass
class _Pool:
    """The small or the large blocks: sizes by (segment, offset), and free blocks sorted by size."""

    is_small: bool
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    ends: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    free: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    segments: int = 0

    def add(self, address: tuple[int, int], size: int, is_free: bool) -> None:
        self.sizes[address] = size
        self.ends[address[0], address[1] + size] = address
        if is_free:
            insort(self.free, (size, address))

    def remove(self, address: tuple[int, int]) -> int:
        size = self.sizes.pop(address)
        del self.ends[address[0], address[1] + size]
        if self.is_free(address, size):
            del self.free[bisect_left(self.free, (size, address))]
        return size

    def is_free(self, address: tuple[int, int], size: int) -> bool:
        at = bisect_left(self.free, (size, address))
        return at < len(self.free) and self.free[at] == (size, address)

    def should_split(self, remainder: int) -> bool:
        """Return whether a remainder of ``remainder`` bytes is split off."""
        return remainder >= ROUNDED_TO if self.is_small else remainder > _SMALL


def make_allocator(device: torch.device) -> CachingAllocator | None:
    """Make a new simulated allocator for a CUDA device; ``None`` where only rounded sizes count."""
    settings = ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    splits_all = "expandable_segments:true" in settings.lower().replace(" ", "")
    return None if device.type != "cuda" or splits_all else CachingAllocator()


class CachingAllocator:
    """Follows requests in order; starts without any block."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._handed_out: dict[int, tuple[_Pool, tuple[int, int]]] = {}

    def add(self, segments: Sequence[MemorySegment], stream: int = 0) -> None:
        """Add segments of a stream."""
        # Blocks of a segment in order; an address is (number of the segment, offset).
        for segment in segments:
            pool = self._pools.setdefault((stream, segment.is_small), _Pool(segment.is_small))
            offset = 0
            for size, is_free in segment.blocks:
                pool.add((pool.segments, offset), size, is_free)
                offset += size
            pool.segments += 1

    def allocate(self, name: int, size: int, stream: int = 0) -> int:
        """Request ``size`` bytes under a name, on a stream; returns the bytes that the allocator counts for them."""
        if size == 0:
            return 0
        size = -(-size // ROUNDED_TO) * ROUNDED_TO
        is_small = size <= _SMALL
        pool = self._pools.setdefault((stream, is_small), _Pool(is_small))
        # Best fit: the first free block that is at least as large; sizes are sorted.
        at = bisect_left(pool.free, (size, (-1, 0)))
        # No block fits: a new segment, of which the request is then split off.
        if at == len(pool.free):
            pool.add((pool.segments, 0), _segment_for(size), is_free=True)
            pool.segments += 1
            at = bisect_left(pool.free, (size, (-1, 0)))
        _, address = pool.free[at]
        counted = pool.remove(address)
        # Below the threshold the remainder stays with the block, and counts for this tensor.
        if pool.should_split(counted - size):
            pool.add((address[0], address[1] + size), counted - size, is_free=True)
            counted = size
        pool.add(address, counted, is_free=False)
        self._handed_out[name] = pool, address
        return counted

    def free(self, name: int) -> None:
        """Free the block requested under a name, and merge it with its free neighbours."""
        if name not in self._handed_out:
            return
        pool, address = self._handed_out.pop(name)
        size = pool.remove(address)
        # Merge with the neighbours behind and in front, if these are free.
        after = (address[0], address[1] + size)
        if after in pool.sizes and pool.is_free(after, pool.sizes[after]):
            size += pool.remove(after)
        before = pool.ends.get(address)
        if before is not None and pool.is_free(before, pool.sizes[before]):
            size += pool.remove(before)
            address = before
        pool.add(address, size, is_free=True)


def _segment_for(size: int) -> int:
    """Bytes of a new segment, where no free block is large enough."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _OWN_SEGMENT_FROM:
        return _SEGMENT
    return -(-size // _OWN_SEGMENT_ROUNDED_TO) * _OWN_SEGMENT_ROUNDED_TO
