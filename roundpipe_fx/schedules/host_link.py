"""The link between each device and the host, over which an offloaded model's tensors, gradients and values are copied.

The two directions work in parallel with the device and with each other; copies in one direction run one after another,
in the order in which they are issued. The copy of what a residency window reads begins when the previous window begins,
and the gradients of a window must have been copied before the window after the next one begins
(:mod:`roundpipe_fx.schedules.residency`). Values that leave and come back share both directions with them
(:mod:`roundpipe_fx.schedules.offloads`). Before an action, in this order:

1. copies of values that leave are issued, behind the device's previous action;
2. if a window begins: the device waits for its tensors, and for the gradients that were sent at the previous beginning;
   copies of gradients, and of the next window's tensors, are issued;
3. the device waits for values that are freed now;
4. copies of values that are reloaded are issued;
5. the device waits for those that the action reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from roundpipe_fx.schedules.offloads import Offload
from roundpipe_fx.schedules.residency import ResidencyWindow

__all__ = ["HostLink"]


@dataclass(slots=True)
class _Copies:
    """Numbers of the offloads of which a copy begins or must have ended before an action."""

    leaves: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    reloads: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)


class HostLink:
    """State of all devices' links to the host while a schedule is simulated.

    Attributes:
        spans: for each offload, the seconds at which its copy to the host starts and ends, and its copy back.
    """

    def __init__(
        self,
        windows: Sequence[Sequence[ResidencyWindow]],
        lengths: Sequence[int],
        bandwidth: float,
        offloads: Sequence[Offload] = (),
    ) -> None:
        """Start with no copy in progress.

        Args:
            windows: residency windows of each device.
            lengths: number of actions of each device.
            bandwidth: bytes per second, in each direction.
            offloads: values that are on the host for a while.
        """
        rows = [np.zeros((length, 4)) for length in lengths]
        for own, table in zip(windows, rows, strict=True):
            left = 0
            for window in own:
                table[window.places.start] = [1, window.first, window.brought, left]
                left = sum(window.gradients.values())
        self._table = np.concatenate([np.zeros((0, 4)), *rows])
        self._table[:, 1:] /= bandwidth
        self._last = np.array([sum(own[-1].gradients.values()) / bandwidth if own else 0.0 for own in windows])
        count = len(lengths)
        self._incoming, self._outgoing = np.zeros(count), np.zeros(count)
        """By device, when the copies that were issued so far will have ended."""
        self._tensors, self._gradients = np.zeros(count), np.zeros(count)
        """By device, when the tensors and the gradients that were issued last will have been copied."""
        self._seconds = [own.bytes / bandwidth for own in offloads]
        self._copied = [0.0] * len(offloads)
        """By offload, when its copy that was issued last will have ended."""
        self.spans = [[0.0, 0.0, 0.0, 0.0] for _ in offloads]
        self._values: dict[int, _Copies] = {}
        offsets = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        for number, value in enumerate(offloads):
            for name in ("leaves", "freed", "reloads", "back"):
                place = offsets[value.device] + getattr(value, name)
                getattr(self._values.setdefault(place, _Copies()), name).append(number)

    def ready(self, devices: np.ndarray, places: np.ndarray, clock: np.ndarray) -> np.ndarray:
        """Earliest start of actions as far as the link is concerned, in seconds.

        Args:
            devices: devices of the actions.
            places: positions of the actions among those of all devices.
            clock: seconds at which the devices have finished their previous actions.
        """
        if self._values:
            for device, place, now in zip(devices.tolist(), places.tolist(), clock.tolist(), strict=True):
                self._leave(device, place, now)
        begins, first, following, left = self._table[places].T
        begins = begins > 0
        incoming, outgoing = self._incoming[devices], self._outgoing[devices]
        incoming = np.where(first > 0, np.maximum(incoming, clock) + first, incoming)
        tensors = np.where(first > 0, incoming, self._tensors[devices])
        ready = np.where(begins, np.maximum(tensors, self._gradients[devices]), 0.0)
        incoming = np.where(begins, np.maximum(incoming, clock) + following, incoming)
        outgoing = np.where(begins & (left > 0), np.maximum(outgoing, clock) + left, outgoing)
        self._incoming[devices], self._outgoing[devices] = incoming, outgoing
        self._tensors[devices] = np.where(begins, incoming, self._tensors[devices])
        gone = np.where(left > 0, outgoing, 0.0)
        self._gradients[devices] = np.where(begins, gone, self._gradients[devices])
        if self._values:
            now = np.maximum(clock, ready).tolist()
            moves = zip(devices.tolist(), places.tolist(), now, strict=True)
            ready = np.array([self._reload(device, place, time) for device, place, time in moves])
        return ready

    def _leave(self, device: int, place: int, now: float) -> None:
        """Issue the copies of values that leave before an action."""
        for number in self._values[place].leaves if place in self._values else ():
            start = max(float(self._outgoing[device]), now)
            self._outgoing[device] = self._copied[number] = start + self._seconds[number]
            self.spans[number][:2] = start, self._copied[number]

    def _reload(self, device: int, place: int, now: float) -> float:
        """Wait for values that are freed, issue the copies of those that come back; returns when the action may run."""
        copies = self._values.get(place)
        if copies is None:
            return now
        now = max([now, *(self._copied[number] for number in copies.freed)])
        for number in copies.reloads:
            start = max(float(self._incoming[device]), now)
            self._incoming[device] = self._copied[number] = start + self._seconds[number]
            self.spans[number][2:] = start, self._copied[number]
        return max([now, *(self._copied[number] for number in copies.back)])

    def all_left(self, clock: np.ndarray) -> float:
        """Seconds at which the last gradient has been copied to the host.

        Args:
            clock: seconds at which the devices have finished their last actions.
        """
        return float((np.maximum(self._outgoing, clock) + self._last).max(initial=0.0))
