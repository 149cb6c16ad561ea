"""The link between each device and the host, over which an offloaded model's tensors and gradients are copied.

The two directions work in parallel with the device and with each other; copies in one direction run one after another.
The copy of what a residency window reads begins when the previous window begins, and the gradients of a window must
have been copied before the window after the next one begins (:mod:`roundpipe_fx.schedules.residency`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roundpipe_fx.schedules.residency import ResidencyWindow

__all__ = ["HostLink"]


class HostLink:
    """State of all devices' links to the host while a schedule is simulated."""

    def __init__(self, windows: Sequence[Sequence[ResidencyWindow]], lengths: Sequence[int], bandwidth: float) -> None:
        """Start with no copy in progress.

        Args:
            windows: residency windows of each device.
            lengths: number of actions of each device.
            bandwidth: bytes per second, in each direction.
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
        self._brought = np.zeros(len(lengths))
        self._left = np.zeros(len(lengths))

    def ready(self, devices: np.ndarray, places: np.ndarray, clock: np.ndarray) -> np.ndarray:
        """Earliest start of actions as far as the link is concerned, in seconds.

        Args:
            devices: devices of the actions.
            places: positions of the actions among those of all devices.
            clock: seconds at which the devices have finished their previous actions.
        """
        begins, first, following, left = self._table[places].T
        begins = begins > 0
        brought = np.maximum(self._brought[devices], np.where(first > 0, clock, 0.0)) + first
        gone = self._left[devices]
        self._brought[devices] = np.where(begins, np.maximum(brought, clock) + following, self._brought[devices])
        self._left[devices] = np.where(begins, np.maximum(gone, clock) + left, gone)
        return np.where(begins, np.maximum(brought, gone), 0.0)

    def all_left(self, clock: np.ndarray) -> float:
        """Seconds at which the last gradient has been copied to the host.

        Args:
            clock: seconds at which the devices have finished their last actions.
        """
        return float((np.maximum(self._left, clock) + self._last).max(initial=0.0))
