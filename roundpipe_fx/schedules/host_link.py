"""The link between each device and the host, over which values are copied, and an offloaded model's tensors and
gradients.

The two directions work in parallel with the device and with each other, each more slowly while both are busy: a copy
that is issued while the other direction is in use has a share of the rate until that one is done. (The copies there are
not slowed down in turn.) Copies in one direction run one after another, in the order in which they are issued. The copy
of what a residency window reads begins when the previous window begins, and the gradients of a window must have been
copied before the window after the next one begins (:mod:`roundpipe_fx.schedules.residency`). Values that leave and come
back share both directions with them (:mod:`roundpipe_fx.schedules.offloads`). Before an action, in this order:

1. copies of values that leave are issued, behind the device's previous action;
2. if a window begins: the device waits for its tensors, and for the gradients that were sent at the previous beginning;
   copies of gradients, and of the next window's tensors, are issued;
3. the device waits for values that are freed now;
4. copies of values that are reloaded are issued;
5. the device waits for those that the action reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from roundpipe_fx.schedules.offloads import Offload
from roundpipe_fx.schedules.residency import ResidencyWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCopy:
    """A copy of what a residency window reads to its device, or of its gradients to the host.

    Attributes:
        device: number of the device.
        position: position of an action in the order of the device: the window's first one, before which its tensors
            must be there, or its last one, behind which its gradients leave.
        to_host: whether it is of gradients, to the host.
        start: seconds since the beginning of the step.
        end: modelled seconds since the beginning of the step.
    """

    device: int
    position: int
    to_host: bool
    start: float
    end: float
    bytes: int


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
        both_ways: float = 1.0,
    ) -> None:
        """Start with no copy in progress.

        Args:
            windows: residency windows of each device.
            lengths: number of actions of each device.
            bandwidth: bytes per second of one direction alone.
            offloads: values that are on the host for a while.
            both_ways: share of ``bandwidth`` that a copy has beside one in the other direction that began earlier.
        """
        self._windows, self._both_ways = windows, both_ways
        # One row per action: whether a window begins, seconds of its own first copy, of the next window's, and of the
        # gradients that leave.
        rows = [np.zeros((length, 4)) for length in lengths]
        for of_device, table in zip(windows, rows, strict=True):
            # Gradients of a window leave at the beginning of the next one.
            left = 0
            for window in of_device:
                table[window.positions.start] = [1, window.first, window.prefetched, left]
                left = sum(window.gradients.values())
        self._table = np.concatenate([np.zeros((0, 4)), *rows])
        self._table[:, 1:] /= bandwidth
        self._began, self._ended = np.zeros((len(self._table), 3)), np.zeros((len(self._table), 3))
        """At the first action of each window, when copies begin and end: of its tensors if it is the first one, of the
        next one's, of the previous one's gradients."""
        self._last = np.array(
            [sum(of_device[-1].gradients.values()) / bandwidth if of_device else 0.0 for of_device in windows]
        )
        # State per device, since the links of different devices are independent.
        count = len(lengths)
        self._incoming, self._outgoing = np.zeros(count), np.zeros(count)
        """By device, when the copies that were issued so far will have ended."""
        self._tensors, self._gradients = np.zeros(count), np.zeros(count)
        """By device, when the tensors and the gradients that were issued last will have been copied."""
        self._seconds = [offload.bytes / bandwidth for offload in offloads]
        self._copied = [0.0] * len(offloads)
        """By offload, when its copy that was issued last will have ended."""
        self.spans = [[0.0, 0.0, 0.0, 0.0] for _ in offloads]
        self._values: dict[int, _Copies] = {}
        self._offsets = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        for number, value in enumerate(offloads):
            for name in ("leaves", "freed", "reloads", "back"):
                position = self._offsets[value.device] + getattr(value, name)
                getattr(self._values.setdefault(position, _Copies()), name).append(number)

    def ready(self, devices: np.ndarray, positions: np.ndarray, clock: np.ndarray) -> np.ndarray:
        """Earliest start of actions as far as the link is concerned, in seconds.

        Args:
            devices: devices of the actions.
            positions: positions of the actions among those of all devices.
            clock: seconds at which the devices have finished their previous actions.
        """
        # Values leave before the window's copies are issued, as the worker does it.
        if self._values:
            for device, position, now in zip(devices.tolist(), positions.tolist(), clock.tolist(), strict=True):
                self._leave(device, position, now)
        begins, first, following, left = self._table[positions].T
        begins = begins > 0
        incoming, outgoing = self._incoming[devices], self._outgoing[devices]
        # One copy at a time in each direction: a copy begins when the one before it has ended and it has been issued.
        began = [np.maximum(incoming, clock)]
        incoming = np.where(first > 0, self._end(began[0], first, outgoing), incoming)
        tensors = np.where(first > 0, incoming, self._tensors[devices])
        # From here on the memory of gradients from before the last window counts as free, so they must have left.
        ready = np.where(begins, np.maximum(tensors, self._gradients[devices]), 0.0)
        first_ended = incoming
        # The next window's tensors are brought while this one runs.
        began += [np.maximum(incoming, clock), np.maximum(outgoing, clock)]
        incoming = np.where(begins, self._end(began[1], following, outgoing), incoming)
        outgoing = np.where(begins & (left > 0), self._end(began[2], left, incoming), outgoing)
        self._began[positions] = np.stack(began, axis=1)
        self._ended[positions] = np.stack([first_ended, incoming, outgoing], axis=1)
        self._incoming[devices], self._outgoing[devices] = incoming, outgoing
        self._tensors[devices] = np.where(begins, incoming, self._tensors[devices])
        gone = np.where(left > 0, outgoing, 0.0)
        self._gradients[devices] = np.where(begins, gone, self._gradients[devices])
        if self._values:
            now = np.maximum(clock, ready).tolist()
            moves = zip(devices.tolist(), positions.tolist(), now, strict=True)
            ready = np.array([self._reload(device, position, time) for device, position, time in moves])
        return ready

    def _end(self, start: Any, seconds: Any, other: Any) -> Any:
        """When copies end that begin while the other direction may be busy.

        Args:
            seconds: of the copies, if they are alone.
            other: when the copies in the other direction end.
        """
        if self._both_ways == 1:
            return start + seconds
        together = np.maximum(other - start, 0.0)
        copied = together * self._both_ways
        return np.where(copied < seconds, start + together + seconds - copied, start + seconds / self._both_ways)

    def _leave(self, device: int, position: int, now: float) -> None:
        """Issue the copies of values that leave before an action."""
        # Copies to the host queue behind each other, and behind the action that made the value.
        for number in self._values[position].leaves if position in self._values else ():
            start = max(float(self._outgoing[device]), now)
            end = float(self._end(start, self._seconds[number], self._incoming[device]))
            self._outgoing[device] = self._copied[number] = end
            self.spans[number][:2] = start, self._copied[number]

    def _reload(self, device: int, position: int, now: float) -> float:
        """Wait for values that are freed, issue the copies of those that come back; returns when the action may run."""
        copies = self._values.get(position)
        if copies is None:
            return now
        # Memory is reused only when the copy has ended, so the device waits here.
        now = max([now, *(self._copied[number] for number in copies.freed)])
        for number in copies.reloads:
            start = max(float(self._incoming[device]), now)
            end = float(self._end(start, self._seconds[number], self._outgoing[device]))
            self._incoming[device] = self._copied[number] = end
            self.spans[number][2:] = start, self._copied[number]
        return max([now, *(self._copied[number] for number in copies.back)])

    def all_left(self, clock: np.ndarray) -> float:
        """Seconds at which the last gradient has been copied to the host.

        Args:
            clock: seconds at which the devices have finished their last actions.
        """
        return float(self._last_ended(clock).max(initial=0.0))

    def _last_ended(self, clock: np.ndarray) -> np.ndarray:
        ended: np.ndarray = self._end(np.maximum(self._outgoing, clock), self._last, self._incoming)
        return ended

    def window_copies(self, clock: np.ndarray) -> Iterator[WindowCopy]:
        """Copies of tensors and gradients, once all actions were simulated.

        Args:
            clock: seconds at which the devices have finished their last actions.
        """
        last_ended = self._last_ended(clock)
        for device, windows in enumerate(self._windows):
            offset = self._offsets[device]

            def copy(
                position: int, to_host: bool, size: int, start: float, end: float, device: int = device
            ) -> Iterator[WindowCopy]:
                if size:
                    yield WindowCopy(
                        device=device,
                        position=position,
                        to_host=to_host,
                        start=float(start),
                        end=float(end),
                        bytes=size,
                    )

            for window in windows:
                at = offset + window.positions.start, 0
                yield from copy(window.positions.start, False, window.first, self._began[at], self._ended[at])
            for before, window in pairwise(windows):
                at = offset + before.positions.start, 1
                yield from copy(window.positions.start, False, before.prefetched, self._began[at], self._ended[at])
                at, left = (offset + window.positions.start, 2), sum(before.gradients.values())
                yield from copy(before.positions.stop - 1, True, left, self._began[at], self._ended[at])
            if windows:
                start, left = max(self._outgoing[device], clock[device]), sum(windows[-1].gradients.values())
                yield from copy(windows[-1].positions.stop - 1, True, left, start, last_ended[device])
