"""The simulator of time: when each action of a schedule runs, given the costs of the stage actions.

An action starts when the device has finished its previous action and all values that the action reads have been
computed and, if another device computed them, transferred. A link to the host or to replicas may delay it further::

    start(a) = max(end(previous action of the device), end(s) + travel(s, a) for each s that a reads, links(a))
    end(a) = start(a) + seconds(a)

Actions are simulated in waves: in each wave, every device runs its next action if that can start. A wave is a few array
operations over all devices, however many these are. For F of 1 second, B of 2 and transfers of 0.5, start and end in
seconds::

    wave       0          1             2             3             4             5
    device 0   F0.0 0-1   F0.1 1-2      B0.0 waits    B0.0 5-7      B0.1 waits    B0.1 8-10
    device 1   F1.0 waits F1.0 1.5-2.5  B1.0 2.5-4.5  F1.1 4.5-5.5  B1.1 5.5-7.5

Buffers that the previous microbatch updates are waited for, too, without a transfer. The wave of an action follows
those of all that the action waits for; it says nothing else of when the action runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from roundpipe_fx.schedules.action import Action, StageAction
from roundpipe_fx.schedules.data_parallel import ReplicaLink
from roundpipe_fx.schedules.host_link import HostLink, WindowCopy
from roundpipe_fx.schedules.memory import peaks_of
from roundpipe_fx.schedules.offloads import Offload
from roundpipe_fx.schedules.sharding import KeptGathered, gathered_bytes
from roundpipe_fx.schedules.stage_graph import StageGraph
from roundpipe_fx.schedules.step_costs import StepCosts, device_orders
from roundpipe_fx.schedules.timetable import KINDS, Schedule


class Deadlock(ValueError):
    """The devices of a schedule wait for each other.

    Attributes:
        waiting: for each device that waits, (device, its next action, the action that it waits for).
    """

    def __init__(self, waiting: list[tuple[int, Action, Action]]) -> None:
        device, action, awaited = waiting[0]
        more = f"; {len(waiting) - 1} more devices wait" if len(waiting) > 1 else ""
        super().__init__(
            f"the schedule deadlocks: device {device} waits at {action} for {awaited}, "
            f"which does not run before it{more}."
        )
        self.waiting = waiting


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When the actions of a schedule run.

    Attributes:
        graph: which stage action reads which.
        starts: for each device, the seconds at which its actions start.
        ends: for each device, the seconds at which its actions end.
        peak_bytes: peak bytes of each device.
        action_bytes: for each device, the bytes allocated there at most during each of its actions.
        host_to_device_bytes: bytes of an offloaded model that are copied to the devices.
        left: the seconds at which the last copy to the host has ended, if there are any; with replicas, at which the
            last gradient has been reduced.
        offloads: values that are on the host for a while.
        offload_spans: for each of them, the seconds at which its copy to the host starts and ends, and its copy back.
        window_copies: copies of the model's tensors to the devices, and of gradients to the host.
        returned_bytes: bytes of each gradient that is copied to the host.
        gathered_bytes: for each device, bytes of sharded parameters that it gathers.
        kept: sharded parameters that stay gathered for a while.
        collective_seconds: with replicas, how long the gathers and reductions of each device take in all.
    """

    schedule: Schedule
    graph: StageGraph = field(repr=False)
    starts: tuple[np.ndarray, ...] = field(repr=False)
    ends: tuple[np.ndarray, ...] = field(repr=False)
    peak_bytes: tuple[int, ...]
    action_bytes: tuple[np.ndarray, ...] = field(repr=False)
    host_to_device_bytes: int = 0
    left: float | None = None
    offloads: tuple[Offload, ...] = ()
    offload_spans: tuple[tuple[float, ...], ...] = field(repr=False, default=())
    window_copies: tuple[WindowCopy, ...] = field(repr=False, default=())
    returned_bytes: tuple[int, ...] = ()
    gathered_bytes: tuple[int, ...] = ()
    kept: tuple[KeptGathered, ...] = ()
    collective_seconds: tuple[float, ...] = ()

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end; for an offloaded model with the copies before and after, with
        replicas with the gathers before and the reductions after."""
        ends = [end[-1] for end in self.ends if len(end)]
        if self.left is not None:
            return max(self.left, *map(float, ends))
        starts = [start[0] for start in self.starts if len(start)]
        return float(max(ends) - min(starts)) if ends else 0.0

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds during which each device runs actions."""
        return tuple(float((end - start).sum()) for start, end in zip(self.starts, self.ends, strict=True))

    @property
    def bubble(self) -> float:
        """Share of the devices' time that they spend waiting, in [0, 1)."""
        total = self.makespan * self.schedule.devices
        return 1 - sum(self.busy) / total if total else 0.0


def simulate_time(
    schedule: Schedule,
    graph: StageGraph,
    costs: StepCosts,
    others: Mapping[int, StepCosts] | None = None,
    offloads: Sequence[Offload] = (),
    kept: Sequence[KeptGathered] = (),
) -> Timing:
    """Simulate a schedule.

    Args:
        schedule: the actions of each device, in order.
        graph: which stage action reads which.
        costs: seconds and bytes of the stage actions, for a full microbatch.
        others: costs of microbatches of another size, by index; only their bytes are used.
        offloads: values that are on the host for a while.
        kept: sharded parameters that stay gathered for a while.

    Returns:
        start and end of each action in seconds, and peak bytes of each device.

    Raises:
        Deadlock: devices wait for each other, or for an action that is not in the schedule.
    """
    steps = list(graph.steps)
    codes, reads, carried, travel = _as_arrays(schedule, graph, costs, steps)
    seconds = np.array([costs.seconds.get(step, 0.0) for step in steps])
    windows = costs.windows(schedule, codes, steps)
    lengths = [len(of_device) for of_device in codes]
    link = None
    if costs.on_host is not None or offloads:
        assert costs.host_bandwidth is not None
        link = HostLink(windows, lengths, costs.host_bandwidth, offloads, costs.both_ways)
    replicas = None
    if costs.data_parallel is not None:
        gathers = costs.gathers(schedule, kept)
        replicas = ReplicaLink(costs.data_parallel, gathers, costs.buckets(schedule), lengths)
    if costs.network is not None:
        # With nodes, the seconds depend on the devices that run maker and reader; otherwise all pairs are alike.
        travel = _travel(costs, codes, reads, steps)
    links = [shared_link for shared_link in (link, replicas) if shared_link is not None]
    ends, waves = _run(schedule, codes, reads, carried, travel, seconds, steps, links)
    # Only ends are noted as it goes: a start follows from its end.
    starts = tuple(end - seconds[codes_of_device] for end, codes_of_device in zip(ends, codes, strict=True))
    peaks = peaks_of(schedule, codes, ends, waves, reads, steps, costs, others or {}, windows, offloads, kept)
    timing = Timing(
        schedule=schedule,
        graph=graph,
        starts=starts,
        ends=tuple(ends),
        peak_bytes=tuple(peak for peak, _ in peaks),
        action_bytes=tuple(during for _, during in peaks),
        gathered_bytes=_gathered(schedule, costs, kept),
        kept=tuple(kept),
    )
    # The links go on after the last action: gradients are still reduced, or copied to the host.
    clock = np.array([end[-1] if len(end) else 0.0 for end in ends])
    if links:
        timing = dataclasses.replace(timing, left=max(shared_link.all_left(clock) for shared_link in links))
    if replicas is not None:
        timing = dataclasses.replace(timing, collective_seconds=tuple(replicas.seconds))
    if link is None:
        return timing
    prefetched = sum(window.first + window.prefetched for of_device in windows for window in of_device)
    returned = tuple(size for of_device in windows for window in of_device for size in window.gradients.values())
    return dataclasses.replace(
        timing,
        host_to_device_bytes=prefetched,
        offloads=tuple(offloads),
        offload_spans=tuple(map(tuple, link.spans)),
        window_copies=tuple(link.window_copies(clock)),
        returned_bytes=returned,
    )


def _as_arrays(
    schedule: Schedule, graph: StageGraph, costs: StepCosts, steps: Sequence[StageAction]
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    """A schedule and its graph as numbers of stage actions.

    Returns:
        for each device, the stage action of each of its actions; for each stage action, those that it reads, those of
        the previous microbatch that it reads, and the seconds that each result that it reads travels. Rows are padded
        with -1.
    """
    number = {step: index for index, step in enumerate(steps)}
    code = np.full((len(KINDS), 1 + max((stage for _, stage in steps), default=0)), -1, dtype=np.int32)
    for (kind, stage), index in number.items():
        # A table from (kind, stage) to the number of the stage action, so that orders are translated by one indexing.
        code[KINDS.index(kind), stage] = index
    width = max((len(reads) for reads in graph.reads.values()), default=0)
    # A missing source is -1: the row of ``end_of`` that was over before the step began.
    reads = np.full((len(steps), max(width, 1)), -1, dtype=np.int32)
    travel = np.zeros(reads.shape)
    for step, sources in graph.reads.items():
        for position, source in enumerate(sources):
            reads[number[step], position] = number[source]
            travel[number[step], position] = costs.transfer_seconds.get((source, step), 0.0)
    carried = np.full((len(steps), max(map(len, graph.carried.values()), default=0)), -1, dtype=np.int32)
    for step, sources in graph.carried.items():
        carried[number[step], : len(sources)] = [number[source] for source in sources]
    return [code[order[:, 0], order[:, 1]] for order in schedule.orders], reads, carried, travel


def _gathered(schedule: Schedule, costs: StepCosts, kept: Sequence[KeptGathered]) -> tuple[int, ...]:
    """Bytes that each device gathers."""
    if costs.sharded is None:
        return ()
    return tuple(
        gathered_bytes(order, costs.sharded, [stay for stay in kept if stay.device == order.device])
        for order in device_orders(schedule)
    )


def _travel(
    costs: StepCosts, codes: Sequence[np.ndarray], reads: np.ndarray, steps: Sequence[StageAction]
) -> np.ndarray:
    """Seconds of sending the results that stage actions read, by the nodes of the devices that run both."""
    network, replicas = costs.network, costs.data_parallel
    assert network is not None
    device_of = {code: device for device, of_device in enumerate(codes) for code in np.unique(of_device).tolist()}
    travel = np.zeros(reads.shape)
    for step, position in np.argwhere(reads >= 0).tolist():
        source = int(reads[step, position])
        if step in device_of and source in device_of:
            devices = device_of[source], device_of[step]
            leaves = network.leaves(*devices, len(codes), replicas.ring.ranks if replicas is not None else 1)
            travel[step, position] = network.send_seconds(costs.sent_bytes.get((steps[source], steps[step]), 0), leaves)
    return travel


def _run(
    schedule: Schedule,
    codes: list[np.ndarray],
    reads: np.ndarray,
    carried: np.ndarray,
    travel: np.ndarray,
    seconds: np.ndarray,
    names: list[StageAction],
    links: Sequence[HostLink | ReplicaLink] = (),
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Simulate in waves; returns for each device the seconds at which its actions end, and the wave of each action.

    A wave takes the next action of every device that has one left, and runs those whose sources have ended. ``end_of``
    holds the end of every stage action for every microbatch, or NaN while it has not run: the maximum over an action's
    sources is then NaN exactly if it cannot start yet. If no action of a wave can start, the schedule deadlocks.
    """
    steps = len(names)
    lengths = np.array([len(of_device) for of_device in codes])
    # All devices' actions in one array; device d's next one is at offsets[d] + at[d].
    offsets = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    flat = np.concatenate([np.zeros(0, np.int32), *codes]).astype(np.intp)
    microbatch = np.concatenate([np.zeros(0, np.int32), *(order[:, 2] for order in schedule.orders)]).astype(np.intp)
    end_of = np.full((steps + 1, max(schedule.microbatches, 1)), np.nan)
    end_of[steps] = -np.inf  # the source of actions that read nothing
    # Which device runs a stage action may differ from microbatch to microbatch, so it is noted as it runs.
    maker = np.full(end_of.shape, -1, dtype=np.int32)
    ends = np.empty(len(flat))
    waves = np.empty(len(flat), dtype=np.int32)
    wave = 0
    at = np.zeros(len(codes), dtype=np.intp)
    clock = np.zeros(len(codes))
    devices = np.flatnonzero(lengths > 0)
    travels = bool(travel.any())
    while len(devices):
        position = offsets[devices] + at[devices]
        codes_now, batch = flat[position], microbatch[position]
        sources = reads[codes_now]
        # Advanced indexing: rows are ready candidates, columns their sources.
        arrival = end_of[sources, batch[:, None]]
        if travels:
            # A result travels only if another device made it.
            arrival = arrival + np.where(maker[sources, batch[:, None]] != devices[:, None], travel[codes_now], 0.0)
        latest = arrival.max(axis=1)  # NaN if a source has not run yet
        # Buffers as updated by the previous microbatch; the first microbatch reads the caller's.
        if carried.size:
            before = np.where(batch[:, None] > 0, carried[codes_now], -1)
            latest = np.maximum(latest, end_of[before, batch[:, None] - 1].max(axis=1))
        ready = ~np.isnan(latest)
        if not ready.any():
            raise _deadlock(schedule, devices, at, end_of, reads, carried, codes_now, batch, names)
        runs, position, codes_now, batch = devices[ready], position[ready], codes_now[ready], batch[ready]
        # All sources ended in earlier waves, so actions of one wave do not depend on each other.
        start = np.maximum(clock[runs], latest[ready])
        for link in links:
            # Copies are issued behind the previous action, before its device waits for results: a link gets the clock.
            start = np.maximum(start, link.ready(runs, position, clock[runs]))
        end = start + seconds[codes_now]
        clock[runs] = end
        ends[position] = end
        waves[position] = wave
        wave += 1
        end_of[codes_now, batch] = end
        if travels:
            maker[codes_now, batch] = runs
        at[runs] += 1
        # Devices that are done leave the arrays: at the end of a step most are, and waves get cheap.
        if (at[runs] == lengths[runs]).any():
            devices = devices[at[devices] < lengths[devices]]
    return np.split(ends, offsets[1:]), np.split(waves, offsets[1:])


def _deadlock(
    schedule: Schedule,
    devices: np.ndarray,
    at: np.ndarray,
    end_of: np.ndarray,
    reads: np.ndarray,
    carried: np.ndarray,
    steps: np.ndarray,
    batch: np.ndarray,
    names: list[StageAction],
) -> Deadlock:
    waiting = []
    for device, step, microbatch in zip(devices.tolist(), steps.tolist(), batch.tolist(), strict=True):
        kind, stage, _ = schedule.orders[device][at[device]].tolist()
        sources = [(source, microbatch) for source in reads[step].tolist()]
        sources += [(source, microbatch - 1) for source in carried[step].tolist() if microbatch]
        # One is enough to name: the user sees where the circle is from any of its actions.
        missing, reader = next((source, reader) for source, reader in sources if np.isnan(end_of[source, reader]))
        awaited = Action(names[missing][0], names[missing][1], reader)
        waiting.append((device, Action(KINDS[kind], stage, microbatch), awaited))
    return Deadlock(waiting)
