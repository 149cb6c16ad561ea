"""The streams and events that programs refer to by number.

The graph of a program contains ``torch.ops.streams`` operations; its source calls ``streams.fork(0, 1)`` and so on. The
operators look streams up in a table of Dynamo that every trace clears, so each method here does what the operator of
the same name does, on streams and events that belong to the program. On the CPU they do nothing::

    streams.record_event(2, 0)          stream 0   ─•─▶ stage_1_backward ──•─▶ stage_0_backward
    … = stage_1_backward(…)                         │ event 2              │ event 3
    streams.fork(0, 1)                  stream 1    └─▶ stage_0_recompute ─┘
    streams.wait_event(2, 1)
    … = stage_0_recompute(…)            calls between fork and join are issued to stream 1
    streams.record_event(3, 1)
    streams.join(1, 0)
    streams.wait_event(3, 0)
    … = stage_0_backward(…)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch

FIRST_EVENT = 2
_NOTHING = contextlib.nullcontext()


class NoStreams:
    """Streams of a program on the CPU: everything runs in program order."""

    used: Sequence[torch.Stream] = ()

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Context manager around one run of the program."""
        return _NOTHING

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


@functools.cache
def side_stream(device: torch.device) -> torch.Stream:
    """The side stream of all programs on a device: libraries keep memory for each stream that they run on."""
    return torch.Stream(device)


class AcceleratorStreams:
    """Streams of a program on an accelerator: 0 is the caller's stream, 1 a side stream; events are numbered from 2."""

    def __init__(self, device: torch.device, events: int) -> None:
        self._device = device
        self._has_side = events > 0
        self._side = side_stream(device)
        self._events = [torch.Event(device) for _ in range(events)]
        self._streams = [self._side, self._side]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager around one run of the program. On exit, the caller's stream is current again."""
        with torch.accelerator.device_index(self._device.index):  # setting a stream sets the device as well
            main = torch.accelerator.current_stream(self._device)
            self._streams = [main, self._side]
            try:
                yield
            finally:
                torch.accelerator.set_stream(main)

    @property
    def used(self) -> Sequence[torch.Stream]:
        """The streams that operations of the program run on, inside :meth:`running`."""
        return self._streams if self._has_side else self._streams[:1]

    def fork(self, from_stream: int, to_stream: int) -> None:
        """Make ``to_stream`` current."""
        torch.accelerator.set_stream(self._streams[to_stream])

    def join(self, from_stream: int, to_stream: int) -> None:
        """Make ``to_stream`` current again."""
        torch.accelerator.set_stream(self._streams[to_stream])

    def record_event(self, event: int, stream: int) -> None:
        """Record an event on ``stream``."""
        self._events[event - FIRST_EVENT].record(self._streams[stream])

    def wait_event(self, event: int, stream: int) -> None:
        """Make ``stream`` wait for an event."""
        self._events[event - FIRST_EVENT].wait(self._streams[stream])

    def record_streams(self, tensors: Sequence[torch.Tensor], stream: int) -> None:
        """Tell the allocator that ``stream`` reads ``tensors``, which were allocated on another stream."""
        for tensor in tensors:
            if tensor.device.type == "cpu":  # generator states
                continue
            tensor.record_stream(self._streams[stream])


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Context manager in which ``stream`` and its device are current. Setting a stream sets the device as well."""
    with torch.accelerator.device_index(stream.device.index):
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
