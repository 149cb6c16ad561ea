"""Positions of stage actions in the devices' orders, by microbatch.

Vector clocks tell which actions of other devices are certainly over when an action ends, however long each takes.

The method is that of Fidge, 1988, and Mattern, 1989. An action depends on the previous one of its device and on those
that it reads, so its clock is the maximum of theirs, plus itself::

    device 0   F0.0 [1 0] ── F0.1 [2 0] ───────────── B0.0 [3 2]
                   └──────┐                      ┌──────┘
    device 1            F1.0 [1 1] ── B1.0 [1 2] ┘
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roundpipe_fx.schedules.timetable import Schedule


class ActionPositions:
    """Positions at which stage actions run in each device's order, by microbatch."""

    def __init__(self, schedule: Schedule, codes: Sequence[np.ndarray]) -> None:
        self._at: list[dict[int, np.ndarray]] = []
        count = max(schedule.microbatches, 1)
        for order, codes_of_device in zip(schedule.orders, codes, strict=True):
            positions_of_code: dict[int, np.ndarray] = {}
            self._at.append(positions_of_code)
            if not len(codes_of_device):
                continue
            # One sort groups a device's positions by stage action, instead of one scan of the order for each of them.
            sorting = np.argsort(codes_of_device, kind="stable")
            values, starts = np.unique(codes_of_device[sorting], return_index=True)
            for value, positions in zip(values.tolist(), np.split(sorting, starts[1:]), strict=True):
                at = np.full(count, -1, dtype=np.int64)
                at[order[positions, 2]] = positions
                positions_of_code[value] = at
        self._devices: dict[int, list[int]] = {}
        for device, positions_of_code in enumerate(self._at):
            for step in positions_of_code:
                self._devices.setdefault(step, []).append(device)

    def devices(self, step: int) -> list[int]:
        """Devices that run a stage action."""
        return self._devices.get(step, [])

    def of(self, step: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """For each device that runs a stage action: the device, the positions, and their microbatches."""
        positions = []
        for device in self.devices(step):
            at = self._at[device][step]
            batches = np.flatnonzero(at >= 0)
            positions.append((device, at[batches], batches))
        return positions

    def where(self, step: int, microbatch: int) -> tuple[int, int]:
        """The device and the position at which a stage action runs for a microbatch."""
        for device in self.devices(step):
            at = int(self._at[device][step][microbatch])
            if at >= 0:
                return device, at
        raise KeyError(f"no device runs stage action {step} for microbatch {microbatch}")

    def last(self, device: int, readers: Sequence[int], batches: np.ndarray) -> np.ndarray:
        """For each microbatch, the last position on a device at which one of ``readers`` runs; -1 if none does."""
        latest = np.full(len(batches), -1, dtype=np.int64)
        for reader in readers:
            at = self._at[device].get(reader)
            if at is not None:
                latest = np.maximum(latest, at[batches])
        return latest

    def first(self, device: int, makers: Sequence[int], batches: np.ndarray) -> np.ndarray:
        """For each microbatch, the first position on a device at which one of ``makers`` runs; -1 if none does."""
        earliest = np.full(len(batches), -1, dtype=np.int64)
        for maker in makers:
            at = self._at[device].get(maker)
            if at is not None:
                at_batches = at[batches]
                earliest = np.where(
                    (at_batches >= 0) & ((earliest < 0) | (at_batches < earliest)), at_batches, earliest
                )
        return earliest


def vector_clocks(
    schedule: Schedule,
    codes: Sequence[np.ndarray],
    waves: Sequence[np.ndarray],
    reads: np.ndarray,
    positions: ActionPositions,
) -> list[np.ndarray]:
    """For each device and each of its actions, the number of actions of every device that must be over when it ends.

    Args:
        schedule: the order in which devices run their actions.
        codes: for each device, the number of each action's stage action.
        waves: for each device, a number for each action that is greater than those of all that it waits for.
        reads: for each stage action, the numbers of those that it reads; padded with -1.
        positions: where stage actions run.
    """
    clocks = [np.zeros((len(of_device), len(codes)), dtype=np.int64) for of_device in codes]
    # By waves, whatever an action waits for has its clock already.
    order = sorted(
        (wave, device, at) for device, of_device in enumerate(waves) for at, wave in enumerate(of_device.tolist())
    )
    for _, device, at in order:
        # A vector clock (Mattern, 1989): the maximum over the previous action on the device and over all that is read.
        clock = clocks[device][at]
        if at:
            np.maximum(clock, clocks[device][at - 1], out=clock)
        batch = int(schedule.orders[device][at, 2])
        for source in reads[codes[device][at]].tolist():
            if source >= 0:
                maker, position = positions.where(source, batch)
                np.maximum(clock, clocks[maker][position], out=clock)
        clock[device] = at + 1
    return clocks
