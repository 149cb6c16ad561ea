"""Histories: which blocks a caching allocator may have when a step begins.

The allocator hands out the smallest free block that a request fits into, with up to 1 MiB that it does not split off.
So the bytes that it counts for a step depend on the blocks that earlier work has left: for a model with values of 1 to
8 MiB one free segment of 34 MiB was seen to change the peak by −6 % to +1.3 %. Those of later steps are not known when
a plan is made, so it is judged by the worst of a few histories: without any block; with free memory for the whole step
in one segment, or for half of it, as a larger step leaves it; with the blocks that the device has now; and with those
that remain of them when the cache is emptied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from roundpipe_fx.analysis.caching_allocator import NO_HISTORY, History, MemorySegment, make_allocator

_ROUNDED_TO = 2 << 20
"""Bytes of a segment are a multiple of this."""
_IN_USE = ("active_allocated", "active_pending_free", "active_awaiting_free")


def find_histories(device: torch.device, needed: int) -> tuple[History, ...]:
    """Find the histories by which all plans for a device are judged; none where only rounded sizes count.

    Args:
        needed: the peak of a step, in bytes, without what is not split off.
    """
    if make_allocator(device) is None:
        return ()
    sizes = dict.fromkeys(-(-size // _ROUNDED_TO) * _ROUNDED_TO for size in (needed, needed // 2))
    return NO_HISTORY, *(History((MemorySegment(is_small=False, blocks=((size, True),)),)) for size in sizes if size)


def read_current_histories(device: torch.device) -> tuple[History, ...]:
    """The blocks that a CUDA device has now on the current stream, and those that remain when its cache is emptied.

    None where they do not count, are not known, or would make the plans of processes different.
    """
    if make_allocator(device) is None or not torch.cuda.is_initialized() or _is_distributed():
        return ()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count() or torch.cuda.is_current_stream_capturing():
        return ()
    stream = torch.cuda.current_stream(index).cuda_stream
    snapshot = [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and segment["stream"] == stream and tuple(segment["segment_pool_id"]) == (0, 0)
    ]
    segments = tuple(_segments(snapshot))
    in_use = tuple(segment for segment in segments if not all(is_free for _, is_free in segment.blocks))
    return tuple(dict.fromkeys(History(blocks, has_inputs=True) for blocks in (segments, in_use)))


def _segments(snapshot: Sequence[Mapping[str, Any]]) -> Iterable[MemorySegment]:
    for segment in sorted(snapshot, key=lambda segment: segment["address"]):
        blocks = tuple((block["size"], block["state"] not in _IN_USE) for block in segment["blocks"])
        yield MemorySegment(is_small=segment["segment_type"] == "small", blocks=blocks)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
