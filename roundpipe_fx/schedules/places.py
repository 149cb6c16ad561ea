"""Positions of stage actions in the devices' orders, by microbatch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roundpipe_fx.schedules.timetable import Schedule

__all__ = ["Places"]


class Places:
    """Positions at which stage actions run in each device's order, by microbatch."""

    def __init__(self, schedule: Schedule, codes: Sequence[np.ndarray]) -> None:
        self._at: list[dict[int, np.ndarray]] = []
        count = max(schedule.microbatches, 1)
        for order, codes_of_device in zip(schedule.orders, codes, strict=True):
            places_of_code: dict[int, np.ndarray] = {}
            self._at.append(places_of_code)
            if not len(codes_of_device):
                continue
            sorting = np.argsort(codes_of_device, kind="stable")
            values, starts = np.unique(codes_of_device[sorting], return_index=True)
            for value, places in zip(values.tolist(), np.split(sorting, starts[1:]), strict=True):
                at = np.full(count, -1, dtype=np.int64)
                at[order[places, 2]] = places
                places_of_code[value] = at
        self._devices: dict[int, list[int]] = {}
        for device, places_of_code in enumerate(self._at):
            for step in places_of_code:
                self._devices.setdefault(step, []).append(device)

    def devices(self, step: int) -> list[int]:
        """Devices that run a stage action."""
        return self._devices.get(step, [])

    def of(self, step: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """For each device that runs a stage action: the device, the positions, and their microbatches."""
        places = []
        for device in self.devices(step):
            at = self._at[device][step]
            batches = np.flatnonzero(at >= 0)
            places.append((device, at[batches], batches))
        return places

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
