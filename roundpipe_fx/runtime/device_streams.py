"""Lanes: how a worker's device runs, sends and receives.

On the CPU a lane is the thread itself: what is sent is the tensor. On an accelerator it is a compute stream with a copy
stream for each direction: what is sent is copied on the copy streams while both devices compute, and an event tells the
receiving compute stream when it is there. The host waits for nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from roundpipe_fx.runtime.copies import copied, copied_together
from roundpipe_fx.runtime.streams import on_stream

__all__ = ["DeviceStreams", "HostDeviceStreams", "Message", "device_streams_of"]


@dataclass(frozen=True, slots=True)
class Message:
    """Values on their way from one device to another.

    Attributes:
        numbers: which values.
        values: on the receiver's device.
        arrived: an event on an accelerator; ``None`` on the CPU.
    """

    numbers: tuple[int, ...]
    values: tuple[Any, ...]
    arrived: Any = None


class DeviceStreams(Protocol):
    """What a worker asks of its device."""

    device: torch.device

    def prepare(self, caller_device: torch.device, devices: Collection[torch.device]) -> None:
        """Called in the caller's thread before a step: what he has issued comes first."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Around all that the worker does for a step."""

    def to_device(self, value: Any) -> Any:
        """A tensor of the caller's, on this device."""

    def inherit(self, values: Sequence[Any]) -> Sequence[Any]:
        """What an earlier run has left, on some worker's device, on this one's, to be read from here on."""

    def drop(self, value: Any) -> None:
        """Nothing on this device reads a tensor of the caller's any more in this step."""

    def send(self, numbers: tuple[int, ...], values: Sequence[Any], to: DeviceStreams) -> Message:
        """Start sending values."""

    def receive(self, message: Message) -> tuple[Any, ...]:
        """The values of a message, to be read from here on."""

    def mark(self) -> Any:
        """This moment, for :meth:`seconds`."""

    def to_caller(self, value: Any) -> Any:
        """A result, on the caller's device."""

    def ready(self) -> Any:
        """What this worker has issued until now, for :meth:`after` of another."""

    def after(self, ready: Any, value: Any) -> None:
        """From here on read a value that another worker, on the caller's device, had made until ``ready``."""

    def finish(self) -> None:
        """Let the caller's stream wait for all that was issued."""

    def exchange(self, drops: Sequence[torch.Tensor], brings: Sequence[torch.Tensor]) -> None:
        """Let copies of tensors of the host go and begin to copy others; what was begun before may be read now."""

    def offload_gradients(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Begin to copy gradients to the host, where they are once :meth:`synchronize_copies` has returned."""

    def synchronize_copies(self) -> None:
        """Wait until nothing is copied from or to the host any more."""


class HostDeviceStreams:
    """A worker on the CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def prepare(self, caller_device: torch.device, devices: Collection[torch.device]) -> None:
        """Nothing to wait for."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around all that the worker does for a step."""
        yield

    def to_device(self, value: Any) -> Any:
        """A tensor of the caller's: itself."""
        return value

    def inherit(self, values: Sequence[Any]) -> Sequence[Any]:
        """What an earlier run has left: as it is."""
        return values

    def drop(self, value: Any) -> None:
        """Nothing was copied."""

    def send(self, numbers: tuple[int, ...], values: Sequence[Any], to: DeviceStreams) -> Message:
        """Values as they are."""
        return Message(numbers, tuple(values))

    def receive(self, message: Message) -> tuple[Any, ...]:
        """The values of a message."""
        return message.values

    def mark(self) -> float:
        """This moment, in seconds."""
        return time.perf_counter()

    def to_caller(self, value: Any) -> Any:
        """A result: itself."""
        return value

    def ready(self) -> None:
        """It is there."""

    def after(self, ready: Any, value: Any) -> None:
        """Nothing to wait for."""

    def finish(self) -> None:
        """Nothing to wait for."""

    def exchange(self, drops: Sequence[torch.Tensor], brings: Sequence[torch.Tensor]) -> None:
        """Tensors of the host are where they are read."""

    def offload_gradients(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of gradients."""
        return [gradient.clone() for gradient in gradients]

    def synchronize_copies(self) -> None:
        """Nothing to wait for."""


class AcceleratorDeviceStreams:
    """A worker on an accelerator: one compute stream, a copy stream for what goes out and one for what comes in."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute = torch.Stream(device)
        self.outgoing = torch.Stream(device)
        self.incoming = torch.Stream(device)
        self._caller_device = device
        self._callers: dict[torch.device, torch.Stream] = {}
        self._copies: dict[int, tuple[Any, torch.Tensor]] = {}
        self._leaving: list[torch.Tensor] = []
        self._brought: Any = None
        self._left: Any = None

    def prepare(self, caller_device: torch.device, devices: Collection[torch.device]) -> None:
        """Note the caller's streams, on his own and the workers' devices: streams are of a thread, his must tell."""
        self._caller_device = caller_device
        self._callers = {device: torch.accelerator.current_stream(device) for device in (caller_device, *devices)}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The compute stream is current and has waited for the caller's; copies of his tensors last as long."""
        for caller in self._callers.values():
            self.compute.wait_stream(caller)
            self.incoming.wait_stream(caller)
        with on_stream(self.compute):
            try:
                yield
            finally:
                self._copies.clear()

    def to_device(self, value: Any) -> Any:
        """A tensor of the caller's on this device: itself, or a copy that is held until :meth:`drop`."""
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if not isinstance(value, torch.Tensor) or value.device == self.device or value.device.type == "cpu":
            return value
        (copy,) = self._copy([value.detach()])
        self._copies[id(value)] = (value, copy)
        return copy

    def inherit(self, values: Sequence[Any]) -> Sequence[Any]:
        """What an earlier run has left: the stream that reads it is perhaps not the one whose memory it has."""
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.device.type != "cpu"]
        elsewhere = {value.device for value in tensors} - {self.device}
        for value in tensors:
            value.record_stream(self.compute if value.device == self.device else self._callers[value.device])
        for device in elsewhere:
            places = [place for place, value in enumerate(values) if _is_on(value, device)]
            moved = self._copy([values[place] for place in places])
            values = list(values)
            for place, value in zip(places, moved, strict=True):
                values[place] = value
        return values

    def _copy(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copies on this device, for the compute stream. The caller's stream reads, and has waited for their making.

        Args:
            values: on one other device.
        """
        with on_stream(self._callers[values[0].device]), on_stream(self.incoming):
            copies = copied_together(values, self.device)
            arrived = self.incoming.record_event()
        self.compute.wait_event(arrived)
        for copy in copies:
            copy.record_stream(self.compute)
        return copies

    def drop(self, value: Any) -> None:
        """Let the copy of a tensor go."""
        self._copies.pop(id(value), None)

    def send(self, numbers: tuple[int, ...], values: Sequence[Any], to: DeviceStreams) -> Message:
        """Copy values on the copy streams; several workers of one device share its memory."""
        assert isinstance(to, AcceleratorDeviceStreams)
        ready = self.compute.record_event()
        if to.device == self.device:
            return Message(numbers, tuple(values), (ready, self.compute))
        self.outgoing.wait_event(ready)
        to.incoming.wait_event(ready)
        for value in values:
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                value.record_stream(self.outgoing)
        with on_stream(self.outgoing), on_stream(to.incoming):
            sent = copied_together(values, to.device)
            arrived = to.incoming.record_event()
        return Message(numbers, sent, (arrived, to.incoming))

    def receive(self, message: Message) -> tuple[Any, ...]:
        """The compute stream waits for the values; the host does not."""
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
        """A result on the caller's device, ready for his stream."""
        home = self._callers[self._caller_device]
        if not isinstance(value, torch.Tensor) or value.device == home.device or value.device.type == "cpu":
            return value
        with on_stream(home), on_stream(self.compute):
            return copied(value, home.device)

    def ready(self) -> Any:
        """An event on the compute stream."""
        return self.compute.record_event()

    def after(self, ready: Any, value: Any) -> None:
        """The compute stream waits, and so does the caller's, from which copies are made."""
        if value.device == self.device:
            value.record_stream(self.compute)
        self.compute.wait_event(ready)
        self._callers[self._caller_device].wait_event(ready)

    def finish(self) -> None:
        """Called in the caller's thread: its stream waits for the compute stream."""
        torch.accelerator.current_stream(self.device).wait_stream(self.compute)

    # Memory that the copy streams share with the compute stream goes back to its own stream's pool as soon as that has
    # been told to wait for the other. ``record_stream`` would have it wait for an event that the host asks for, and a
    # host that is ahead would find nothing free.

    def exchange(self, drops: Sequence[torch.Tensor], brings: Sequence[torch.Tensor]) -> None:
        """The compute stream waits for what was begun before, the incoming one for what read the copies that go."""
        if self._brought is not None:
            self.compute.wait_event(self._brought)
        if drops:
            self.incoming.wait_event(self.compute.record_event())
            for value in drops:
                del self._copies[id(value)]
        with on_stream(self.incoming):
            for value in brings:
                self._copies[id(value)] = (value, value.detach().to(self.device, non_blocking=True))
        self._brought = self.incoming.record_event()

    def offload_gradients(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """They are held until the next call, by which time they have been copied while the device worked."""
        if self._leaving:
            self.compute.wait_event(self._left)
            self._leaving.clear()
        copies = []
        self.outgoing.wait_event(self.compute.record_event())
        with on_stream(self.outgoing):
            for gradient in gradients:
                copies.append(torch.empty_like(gradient, device="cpu", pin_memory=True))
                copies[-1].copy_(gradient, non_blocking=True)
        self._left = self.outgoing.record_event()
        self._leaving.extend(gradients)
        return copies

    def synchronize_copies(self) -> None:
        """Called in the caller's thread, after a step: the host waits for both copy streams."""
        self.incoming.synchronize()
        self.outgoing.synchronize()
        self._leaving.clear()
        self._brought = self._left = None


def _is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device


def device_streams_of(device: torch.device) -> DeviceStreams:
    """The lane of a device."""
    return HostDeviceStreams() if device.type == "cpu" else AcceleratorDeviceStreams(device)
