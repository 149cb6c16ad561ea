"""The simulator of time: when each action of a schedule runs, given what the steps cost.

An action starts when the device has done what stands before it and when all it reads has been made and, if another
device made it, has travelled. Actions are run in waves: in each, every device runs its next action if that can start.
A wave is a handful of array operations over the devices, so a thousand devices with ten thousand microbatches, twenty
million actions, take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from roundpipe_fx.schedules.action import Action, Step
from roundpipe_fx.schedules.memory import StepCosts, peaks_of
from roundpipe_fx.schedules.schedule import KINDS, Schedule
from roundpipe_fx.schedules.stage_graph import StageGraph

__all__ = ["Deadlock", "Timing", "simulate_time"]


class Deadlock(ValueError):
    """Devices wait for each other.

    Attributes:
        waiting: for each device that waits, (device, what it would do next, the step that it waits for).
    """

    def __init__(self, waiting: list[tuple[int, Action, Step]]) -> None:
        device, action, (kind, stage) = waiting[0]
        more = f"; {len(waiting) - 1} more devices wait" if len(waiting) > 1 else ""
        super().__init__(
            f"the schedule comes to a stop: device {device} waits at {action} for {kind}{stage}.{action.microbatch}, "
            f"which does not run before it{more}."
        )
        self.waiting = waiting


@dataclass(frozen=True)
class Timing:
    """When the actions of a schedule run.

    Attributes:
        schedule: which.
        graph: who reads whom.
        starts: for each device the second at which each of its actions starts.
        ends: likewise.
        peak_bytes: for each device the most bytes at one time.
    """

    schedule: Schedule
    graph: StageGraph = field(repr=False)
    starts: tuple[np.ndarray, ...] = field(repr=False)
    ends: tuple[np.ndarray, ...] = field(repr=False)
    peak_bytes: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        ends = [end[-1] for end in self.ends if len(end)]
        starts = [start[0] for start in self.starts if len(start)]
        return float(max(ends) - min(starts)) if ends else 0.0

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each device works."""
        return tuple(float((end - start).sum()) for start, end in zip(self.starts, self.ends, strict=True))

    @property
    def bubble(self) -> float:
        """Share of the devices' time in which they wait, in [0, 1)."""
        total = self.makespan * self.schedule.devices
        return 1 - sum(self.busy) / total if total else 0.0


def simulate_time(
    schedule: Schedule, graph: StageGraph, costs: StepCosts, others: Mapping[int, StepCosts] | None = None
) -> Timing:
    """Run a schedule on paper.

    Args:
        schedule: what runs where, in order.
        graph: who reads whom.
        costs: in seconds and bytes, of a whole microbatch.
        others: of microbatches that differ, by number; it is their bytes that are taken.

    Raises:
        Deadlock: devices wait for each other, or for what nobody does.
    """
    steps = list(graph.steps)
    number = {step: index for index, step in enumerate(steps)}
    code = np.full((len(KINDS), 1 + max((stage for _, stage in steps), default=0)), -1, dtype=np.int32)
    for (kind, stage), index in number.items():
        code[KINDS.index(kind), stage] = index
    width = max((len(reads) for reads in graph.reads.values()), default=0)
    reads = np.full((len(steps), max(width, 1)), -1, dtype=np.int32)
    travel = np.zeros(reads.shape)
    for step, sources in graph.reads.items():
        for place, source in enumerate(sources):
            reads[number[step], place] = number[source]
            travel[number[step], place] = costs.transfer_seconds.get((source, step), 0.0)
    seconds = np.array([costs.seconds.get(step, 0.0) for step in steps])
    codes = [code[order[:, 0], order[:, 1]] for order in schedule.orders]
    visiting = _visiting(schedule, codes, steps, costs) if costs.on_host is not None else None
    ends, waves = _run(schedule, codes, len(steps), reads, travel, seconds, steps, visiting)
    starts = tuple(end - seconds[own] for end, own in zip(ends, codes, strict=True))
    peaks = peaks_of(schedule, codes, ends, waves, reads, steps, costs, others or {})
    return Timing(schedule, graph, starts, tuple(ends), peaks)


def _run(
    schedule: Schedule,
    codes: list[np.ndarray],
    steps: int,
    reads: np.ndarray,
    travel: np.ndarray,
    seconds: np.ndarray,
    names: list[Step],
    visiting: np.ndarray | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """When each action ends, and in which wave it runs, for each device."""
    lengths = np.array([len(own) for own in codes])
    offsets = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    flat = np.concatenate([np.zeros(0, np.int32), *codes]).astype(np.intp)
    microbatch = np.concatenate([np.zeros(0, np.int32), *(order[:, 2] for order in schedule.orders)]).astype(np.intp)
    end_of = np.full((steps + 1, max(schedule.microbatches, 1)), np.nan)
    end_of[steps] = -np.inf  # what is not read
    maker = np.full(end_of.shape, -1, dtype=np.int32)
    ends = np.empty(len(flat))
    waves = np.empty(len(flat), dtype=np.int32)
    wave = 0
    at = np.zeros(len(codes), dtype=np.intp)
    clock = np.zeros(len(codes))
    devices = np.flatnonzero(lengths > 0)
    travels = bool(travel.any())
    link = None if visiting is None else _Link(visiting, len(codes))
    while len(devices):
        place = offsets[devices] + at[devices]
        own, batch = flat[place], microbatch[place]
        sources = reads[own]
        arrival = end_of[sources, batch[:, None]]
        if travels:
            arrival = arrival + np.where(maker[sources, batch[:, None]] != devices[:, None], travel[own], 0.0)
        latest = arrival.max(axis=1)  # nan where something has not been made yet
        ready = ~np.isnan(latest)
        if not ready.any():
            raise _deadlock(schedule, devices, at, end_of, reads, own, batch, names)
        runs, place, own, batch = devices[ready], place[ready], own[ready], batch[ready]
        start = np.maximum(clock[runs], latest[ready])
        if link is not None:
            start = np.maximum(start, link.begin(runs, place, clock[runs]))
        end = start + seconds[own]
        clock[runs] = end
        ends[place] = end
        waves[place] = wave
        wave += 1
        end_of[own, batch] = end
        if travels:
            maker[own, batch] = runs
        at[runs] += 1
        if (at[runs] == lengths[runs]).any():
            devices = devices[at[devices] < lengths[devices]]
    return np.split(ends, offsets[1:]), np.split(waves, offsets[1:])


def _visiting(schedule: Schedule, codes: Sequence[np.ndarray], steps: Sequence[Step], costs: StepCosts) -> np.ndarray:
    """For each action of all devices: whether a visit begins, and seconds of bringing what it reads if nothing before
    it has, of bringing what the next one reads, and of the gradients that the one before leaves."""
    rows = []
    for order, own in zip(schedule.orders, codes, strict=True):
        rows.append(np.zeros((len(own), 4)))
        turn = int((order[:, 0] == 0).sum()) if schedule.in_halves else 0
        left = 0
        for visit in costs.visits(order, own, steps, turn):
            sizes = np.array([visit.first, visit.brought, left])
            rows[-1][visit.places.start] = [1, *(sizes / costs.host_bandwidth)]
            left = sum(visit.gradients.values())
    return np.concatenate([np.zeros((0, 4)), *rows])


class _Link:
    """What goes between devices and the host beside their work: one copy after another in each direction."""

    def __init__(self, visiting: np.ndarray, devices: int) -> None:
        self._visiting = visiting
        self._brought = np.zeros(devices)
        self._left = np.zeros(devices)

    def begin(self, devices: np.ndarray, places: np.ndarray, clock: np.ndarray) -> np.ndarray:
        """When actions can begin as far as the link goes.

        Args:
            devices: whose actions.
            places: of the actions among those of all devices.
            clock: when the devices have done what stands before.
        """
        begins, first, following, left = self._visiting[places].T
        brought = np.maximum(self._brought[devices], np.where(first > 0, clock, 0.0)) + first
        gone = self._left[devices]  # of the visit before the last one
        begins = begins > 0
        self._brought[devices] = np.where(begins, np.maximum(brought, clock) + following, self._brought[devices])
        self._left[devices] = np.where(begins, np.maximum(gone, clock) + left, gone)
        return np.where(begins, np.maximum(brought, gone), 0.0)


def _deadlock(
    schedule: Schedule,
    devices: np.ndarray,
    at: np.ndarray,
    end_of: np.ndarray,
    reads: np.ndarray,
    own: np.ndarray,
    batch: np.ndarray,
    names: list[Step],
) -> Deadlock:
    waiting = []
    for device, step, microbatch in zip(devices.tolist(), own.tolist(), batch.tolist(), strict=True):
        kind, stage, _ = schedule.orders[device][at[device]].tolist()
        missing = next(source for source in reads[step].tolist() if np.isnan(end_of[source, microbatch]))
        waiting.append((device, Action(KINDS[kind], stage, microbatch), names[missing]))
    return Deadlock(waiting)
