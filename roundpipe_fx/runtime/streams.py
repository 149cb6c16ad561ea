"""Streams and events behind the numbers that programs use.

The graph of a program carries ``torch.ops.streams`` operations; its text calls ``streams.fork(0, 1)`` and its like.
Those operators find streams by number in a table of Dynamo's that every trace clears, so here each does what the
operator of its name does, on streams and events that belong to the program. On the CPU they do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

__all__ = ["AcceleratorStreams", "NoStreams", "on_stream"]

FIRST_EVENT = 2


class NoStreams:
    """The CPU's: everything runs in the order of the program."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around one run of the program."""
        yield

    def fork(self, from_stream: int, to_stream: int) -> None:
        """Nothing to do."""

    def join(self, from_stream: int, to_stream: int) -> None:
        """Nothing to do."""

    def record_event(self, event: int, stream: int) -> None:
        """Nothing to do."""

    def wait_event(self, event: int, stream: int) -> None:
        """Nothing to do."""

    def record_streams(self, tensors: Sequence[torch.Tensor], stream: int) -> None:
        """Nothing to do."""


class AcceleratorStreams:
    """An accelerator's: stream 0 is the caller's, 1 a side stream; events are numbered from 2."""

    def __init__(self, device: torch.device, events: int) -> None:
        self._device = device
        self._side = torch.Stream(device)
        self._events = [torch.Event(device) for _ in range(events)]
        self._streams = [self._side, self._side]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around one run of the program, on its device: stream 0 is the caller's, and it is current again after."""
        with torch.accelerator.device_index(self._device.index):  # setting a stream sets the device as well
            main = torch.accelerator.current_stream(self._device)
            self._streams = [main, self._side]
            try:
                yield
            finally:
                torch.accelerator.set_stream(main)

    def fork(self, from_stream: int, to_stream: int) -> None:
        """Make ``to_stream`` current."""
        torch.accelerator.set_stream(self._streams[to_stream])

    def join(self, from_stream: int, to_stream: int) -> None:
        """Make ``to_stream`` current again."""
        torch.accelerator.set_stream(self._streams[to_stream])

    def record_event(self, event: int, stream: int) -> None:
        """Mark this point of ``stream``."""
        self._events[event - FIRST_EVENT].record(self._streams[stream])

    def wait_event(self, event: int, stream: int) -> None:
        """Let ``stream`` wait for the marked point."""
        self._events[event - FIRST_EVENT].wait(self._streams[stream])

    def record_streams(self, tensors: Sequence[torch.Tensor], stream: int) -> None:
        """Tell the allocator that ``stream`` reads ``tensors``, which another stream made."""
        for tensor in tensors:
            if tensor.device.type == "cpu":  # generator states
                continue
            tensor.record_stream(self._streams[stream])


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """A stream is its device's current one inside, and that device the current one: setting a stream sets both."""
    with torch.accelerator.device_index(stream.device.index):
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
