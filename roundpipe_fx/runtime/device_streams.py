"""Device streams: how a worker's device runs, sends and receives.

On the CPU everything runs in the worker's thread, and a tensor is sent as it is. An accelerator has a compute stream
and a copy stream for each direction: values are copied on the copy streams while both devices compute, and the
receiving compute stream waits for an event. The host waits for nothing::

    device 0   compute     [ F0.0 ]• ready [ F0.1 ]• ready
               outgoing            [ copy of v ]     [ copy of v ]
    device 1   incoming            [ copy of v ]•    [ copy of v ]•     arrived: recorded behind the copy
               compute                          [ F1.0 ]         [ F1.1 ]

Both copy streams wait for ``ready``, and the compute stream of device 1 for ``arrived``. Workers of one device share
its memory: nothing is copied, and the receiver waits for ``ready``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from roundpipe_fx.runtime.copies import copy_to_device, copy_values_to_device
from roundpipe_fx.runtime.host_buffers import HostBuffers, allocating_on_host
from roundpipe_fx.runtime.library_memory import touch_libraries
from roundpipe_fx.runtime.pinned_memory import PinnedGradients, release_idle_pages
from roundpipe_fx.runtime.streams import on_stream

_NO_GRADIENTS = "No gradient of this step is handed out: close other programs, or use a host with more memory."


@dataclass(frozen=True, slots=True)
class Message:
    """Values on their way from one device to another.

    Attributes:
        numbers: numbers of the values.
        values: the values, on the receiver's device.
        arrived: on an accelerator, the event after which they may be read, and its stream; ``None`` on the CPU.
    """

    numbers: tuple[int, ...]
    values: tuple[Any, ...]
    arrived: Any = None


class DeviceStreams(Protocol):
    """Streams that a worker needs of its device."""

    device: torch.device
    host_buffers: HostBuffers

    def touch_libraries(self) -> None:
        """Called in the worker's thread before any step: libraries allocate what they keep."""

    def prepare(self, caller_device: torch.device, devices: Collection[torch.device]) -> None:
        """Called in the caller's thread before a step, which must run after what the caller has issued."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Around all that the worker does for a step."""

    def to_device(self, value: Any) -> Any:
        """The caller's tensor, or its copy, on this device."""

    def inherit(self, values: Sequence[Any]) -> Sequence[Any]:
        """Values that an earlier run has left on any worker's device, on this device, ready to be read."""

    def drop(self, value: Any) -> None:
        """Free the copy of a caller's tensor, which this device does not read again in this step."""

    def send(self, numbers: tuple[int, ...], values: Sequence[Any], to: DeviceStreams) -> Message:
        """Start sending values."""

    def receive(self, message: Message) -> tuple[Any, ...]:
        """The values of a message, ready to be read."""

    def mark(self) -> Any:
        """The current time, for :class:`~roundpipe_fx.runtime.pipeline_run.Span`."""

    def to_caller(self, value: Any) -> Any:
        """A result, copied to the caller's device."""

    def ready(self) -> Any:
        """A marker of what this worker has issued so far, for :meth:`after` of another worker."""

    def after(self, ready: Any, value: Any) -> None:
        """Make later reads of ``value`` wait for another worker, which computed it before ``ready``."""

    def finish(self) -> None:
        """Make the caller's stream wait for all that was issued."""

    def exchange(self, drops: Sequence[torch.Tensor], brings: Sequence[torch.Tensor]) -> None:
        """Free copies of host tensors, and start copying others; those started by the previous call may be read now."""

    def offload_gradients(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Start copying gradients to the host, where they may be read after :meth:`synchronize_copies`."""

    def gradients_arrive(self) -> Callable[[], None]:
        """A function that makes the host wait for the gradients that :meth:`offload_gradients` was given last, and for
        all that was issued before."""

    def synchronize_copies(self) -> None:
        """Wait until all copies from and to the host have finished."""

    def copy_values(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], to_host: bool) -> Any:
        """Start copying values that leave or come back.

        Args:
            pairs: (source, target), of which one is a pinned buffer on the host.
            to_host: whether the targets are.

        Returns:
            a marker for :meth:`wait_for_values`.
        """

    def wait_for_values(self, copied: Any) -> None:
        """Make later work wait for copies of values."""


class HostDeviceStreams:
    """A worker on the CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.host_buffers = HostBuffers(self.device)

    def touch_libraries(self) -> None:
        """Nothing that counts."""

    def prepare(self, caller_device: torch.device, devices: Collection[torch.device]) -> None:
        """Nothing to wait for."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around all that the worker does for a step."""
        yield

    def to_device(self, value: Any) -> Any:
        """The caller's tensor itself."""
        return value

    def inherit(self, values: Sequence[Any]) -> Sequence[Any]:
        """The values themselves."""
        return values

    def drop(self, value: Any) -> None:
        """Nothing to free: nothing was copied."""

    def send(self, numbers: tuple[int, ...], values: Sequence[Any], to: DeviceStreams) -> Message:
        """A message with the values themselves."""
        return Message(numbers, tuple(values))

    def receive(self, message: Message) -> tuple[Any, ...]:
        """The values of a message."""
        return message.values

    def mark(self) -> float:
        """The current time in seconds."""
        return time.perf_counter()

    def to_caller(self, value: Any) -> Any:
        """The result itself."""
        return value

    def ready(self) -> None:
        """Nothing to wait for."""

    def after(self, ready: Any, value: Any) -> None:
        """Nothing to wait for."""

    def finish(self) -> None:
        """Nothing to wait for."""

    def exchange(self, drops: Sequence[torch.Tensor], brings: Sequence[torch.Tensor]) -> None:
        """Nothing to copy: host tensors are read where they are."""

    def offload_gradients(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of gradients."""
        return [gradient.clone() for gradient in gradients]

    def gradients_arrive(self) -> Callable[[], None]:
        """Nothing to wait for."""
        return lambda: None

    def synchronize_copies(self) -> None:
        """Nothing to wait for."""

    def copy_values(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], to_host: bool) -> None:
        """Copy at once."""
        for source, target in pairs:
            target.copy_(source)

    def wait_for_values(self, copied: Any) -> None:
        """Nothing to wait for."""


class AcceleratorDeviceStreams:
    """A worker on an accelerator: a compute stream, and copy streams for outgoing and incoming values."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute = torch.Stream(device)
        self.outgoing = torch.Stream(device)
        self.incoming = torch.Stream(device)
        self.host_buffers = HostBuffers(device)
        self._gradients = PinnedGradients(device)
        self._caller_device = device
        self._callers: dict[torch.device, torch.Stream] = {}
        self._copies: dict[int, tuple[Any, torch.Tensor]] = {}
        self._leaving: list[torch.Tensor] = []
        self._arrived: Any = None
        self._left: Any = None

    def touch_libraries(self) -> None:
        """All that a worker computes runs on the compute stream."""
        touch_libraries(self.compute)

    def prepare(self, caller_device: torch.device, devices: Collection[torch.device]) -> None:
        """Record the caller's streams on its own and on the workers' devices. Current streams are thread-local."""
        self._gradients.settle()
        self._caller_device = caller_device
        self._callers = {device: torch.accelerator.current_stream(device) for device in (caller_device, *devices)}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Make the compute stream current, after the caller's streams. On exit, copies of its tensors are freed."""
        # Nothing on these streams runs before the caller's work is done; events order this on the device.
        for caller in self._callers.values():
            self.compute.wait_stream(caller)
            self.incoming.wait_stream(caller)
        with on_stream(self.compute):
            try:
                yield
            finally:
                # After a failure another worker may still send, into memory that was freed here and is still read.
                self.incoming.wait_stream(self.compute)
                self._copies.clear()

    def to_device(self, value: Any) -> Any:
        """The caller's tensor if it is on this device; else a copy, which is held until :meth:`drop`."""
        # A copy per step and tensor: several stages of this device read the same parameter.
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if not isinstance(value, torch.Tensor) or value.device == self.device or value.device.type == "cpu":
            return value
        (copy,) = self._copy([value.detach()])
        self._copies[id(value)] = (value, copy)
        return copy

    def inherit(self, values: Sequence[Any]) -> Sequence[Any]:
        """The values on this device. They may have been allocated on another stream than the one that reads them."""
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.device.type != "cpu"]
        elsewhere = {value.device for value in tensors} - {self.device}
        # `record_stream` tells the allocator of the second stream, since the forward's worker may have been on another
        # one.
        for value in tensors:
            value.record_stream(self.compute if value.device == self.device else self._callers[value.device])
        for device in elsewhere:
            positions = [position for position, value in enumerate(values) if _is_on(value, device)]
            moved = self._copy([values[position] for position in positions])
            values = list(values)
            for position, value in zip(positions, moved, strict=True):
                values[position] = value
        return values

    def _copy(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copies on this device, for the compute stream. They are read on the caller's stream, which has waited for
        them.

        Args:
            values: tensors on one other device.
        """
        # Copied on two streams: the caller's, so that its memory is not reused too early, and the incoming one, which
        # computes nothing.
        with on_stream(self._callers[values[0].device]), on_stream(self.incoming):
            copies = copy_values_to_device(values, self.device)
            arrived = self.incoming.record_event()
        self.compute.wait_event(arrived)
        for copy in copies:
            copy.record_stream(self.compute)
        return copies

    def drop(self, value: Any) -> None:
        """Free the copy of a tensor."""
        self._copies.pop(id(value), None)

    def send(self, numbers: tuple[int, ...], values: Sequence[Any], to: DeviceStreams) -> Message:
        """Copy values on the copy streams. Workers of one device share its memory, so nothing is copied."""
        assert isinstance(to, AcceleratorDeviceStreams)
        ready = self.compute.record_event()
        if to.device == self.device:
            return Message(numbers, tuple(values), (ready, self.compute))
        # Both copy streams wait for the value; the compute streams of neither device wait, and go on meanwhile.
        self.outgoing.wait_event(ready)
        to.incoming.wait_event(ready)
        for value in values:
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                value.record_stream(self.outgoing)
        with on_stream(self.outgoing), on_stream(to.incoming):
            sent = copy_values_to_device(values, to.device)
            arrived = to.incoming.record_event()
        return Message(numbers, sent, (arrived, to.incoming))

    def receive(self, message: Message) -> tuple[Any, ...]:
        """Make the compute stream wait for the values; the host does not wait."""
        arrived, _ = message.arrived
        self.compute.wait_event(arrived)
        for value in message.values:
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                value.record_stream(self.compute)
        return message.values

    def mark(self) -> Any:
        """An event on the compute stream."""
        event = torch.Event(self.device, enable_timing=True)
        event.record(self.compute)
        return event

    def to_caller(self, value: Any) -> Any:
        """A result on the caller's device, copied on its stream."""
        caller = self._callers[self._caller_device]
        if not isinstance(value, torch.Tensor) or value.device == caller.device or value.device.type == "cpu":
            return value
        with on_stream(caller), on_stream(self.compute):
            return copy_to_device(value, caller.device)

    def ready(self) -> Any:
        """An event on the compute stream."""
        return self.compute.record_event()

    def after(self, ready: Any, value: Any) -> None:
        """Make the compute stream wait, and the caller's stream, from which copies are made."""
        if value.device == self.device:
            value.record_stream(self.compute)
        self.compute.wait_event(ready)
        self._callers[self._caller_device].wait_event(ready)

    def finish(self) -> None:
        """Called in the caller's thread: make its stream wait for the compute stream."""
        torch.accelerator.current_stream(self.device).wait_stream(self.compute)

    # A block used by two streams returns to its allocating stream's pool after that stream waits on the other stream's
    # event. ``record_stream`` is not used here: the allocator would free the block only when the host finds that the
    # event has passed, so a host that runs ahead of the device would find no free memory.

    def exchange(self, drops: Sequence[torch.Tensor], brings: Sequence[torch.Tensor]) -> None:
        """The compute stream waits for the previous copies, the incoming stream for the readers of freed ones."""
        if self._arrived is not None:
            self.compute.wait_event(self._arrived)
        if drops:
            # Freed memory may still be read by what the compute stream was given, so the incoming stream waits before
            # it reuses it.
            self.incoming.wait_event(self.compute.record_event())
            for value in drops:
                del self._copies[id(value)]
        with on_stream(self.incoming):
            # These copies run while the current window computes; the next call makes the compute stream wait for them.
            for value in brings:
                self._copies[id(value)] = (value, value.detach().to(self.device, non_blocking=True))
        self._arrived = self.incoming.record_event()

    def offload_gradients(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients are held until the next call; by then they have been copied while the device computed.

        Raises:
            HostMemoryError: the host has no memory for them.
        """
        # Gradients of the previous window have been copied by now. Holding them until here keeps their memory from
        # being reused while it is read.
        if self._leaving:
            self.compute.wait_event(self._left)
            self._leaving.clear()
        copies = []
        self.outgoing.wait_event(self.compute.record_event())
        with on_stream(self.outgoing):
            for gradient in gradients:
                with allocating_on_host(gradient.nbytes, "gradients that leave the device", _NO_GRADIENTS):
                    copies.append(self._gradients.empty_like(gradient))
                copies[-1].copy_(gradient, non_blocking=True)
        self._left = self.outgoing.record_event()
        self._leaving.extend(gradients)
        return copies

    def gradients_arrive(self) -> Callable[[], None]:
        """Waits for the event behind the copies, which are behind all that the compute stream was given."""
        event: torch.Event = self._left
        return event.synchronize

    def synchronize_copies(self) -> None:
        """Called in the caller's thread after a step: the host waits for both copy streams."""
        self.incoming.synchronize()
        self.outgoing.synchronize()
        self._leaving.clear()
        self._arrived = self._left = None
        release_idle_pages()

    def copy_values(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], to_host: bool) -> Any:
        """Copy behind what the compute stream has been given. Memory on the device is the compute stream's own, held by
        the caller until that has waited for the copies."""
        stream = self.outgoing if to_host else self.incoming
        # The value must have been computed (to the host) or its memory freed by its last reader (to the device).
        stream.wait_event(self.compute.record_event())
        with on_stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait_for_values(self, copied: Any) -> None:
        """Make the compute stream wait; the host does not."""
        self.compute.wait_event(copied)


def _is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device


def device_streams_of(device: torch.device) -> DeviceStreams:
    """The streams of a device."""
    return HostDeviceStreams() if device.type == "cpu" else AcceleratorDeviceStreams(device)
