"""The link between each device and the host, over which an offloaded model's tensors come and their gradients leave.

Both directions work beside the device and beside each other, one copy after another. What a visit reads begins to come
when the visit before it begins, and a visit's gradients must have left before the visit after the next one begins
(:mod:`roundpipe_fx.schedules.residency`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roundpipe_fx.schedules.residency import ResidencyWindow

__all__ = ["HostLink"]


class HostLink:
    """The links of all devices, while a schedule is simulated."""

    def __init__(self, windows: Sequence[Sequence[ResidencyWindow]], lengths: Sequence[int], bandwidth: float) -> None:
        """With nothing on its way.

        Args:
            windows: of each device.
            lengths: how many actions each device has.
            bandwidth: bytes a second.
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
        """When actions can begin as far as the link goes.

        Args:
            devices: whose actions.
            places: of the actions among those of all devices.
            clock: when the devices have done what stands before.
        """
        begins, first, following, left = self._table[places].T
        begins = begins > 0
        brought = np.maximum(self._brought[devices], np.where(first > 0, clock, 0.0)) + first
        gone = self._left[devices]
        self._brought[devices] = np.where(begins, np.maximum(brought, clock) + following, self._brought[devices])
        self._left[devices] = np.where(begins, np.maximum(gone, clock) + left, gone)
        return np.where(begins, np.maximum(brought, gone), 0.0)

    def all_left(self, clock: np.ndarray) -> float:
        """When the last gradient has left.

        Args:
            clock: when the devices have done all.
        """
        return float((np.maximum(self._left, clock) + self._last).max(initial=0.0))
