"""RoundPipe's dispatch: stages are not bound to devices, but dispatched to a pool of them in turn.

RoundPipe (thustorage/RoundPipe) treats devices as stateless workers. Forward and backward are cut into slots
independently, so that all slots take about the same time however uneven the layers are; the last forward slot runs its
own backward immediately. A worker runs a slot for a group of microbatches, while the next worker already runs the next
slot. With equal slots and groups of at least as many microbatches as workers, workers idle only while the first slots
start and the last ones end.

Each slot is assigned to the worker that becomes free first, in turn among equals. A slot that is heavier than the rest
(a head that cannot be cut) would delay everything after it, so its group may be shared among several workers: as many
as the ratio of its seconds to the average slot's. Groups of different sizes are tried, down to one microbatch per
worker, and different limits on the number of workers that share a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe_fx.schedules.action import Action, ActionKind
from roundpipe_fx.schedules.spec import ScheduleSpec
from roundpipe_fx.schedules.timetable import Schedule

_SHARING = 4
"""Upper limit on the number of workers that share a group."""


@dataclass(frozen=True)
class Dispatch:
    """An assignment of slots to workers.

    Attributes:
        runs: (slot, microbatches, worker), in the order of assignment.
        makespan: modelled seconds of the whole schedule, transfers not counted.
    """

    runs: tuple[tuple[int, range, int], ...]
    makespan: float


def dispatch(devices: int, seconds: Sequence[float], microbatches: int, once: bool = False) -> Dispatch:
    """The dispatch with the shortest makespan among group sizes and limits of sharing.

    Args:
        seconds: of each slot, for one microbatch.
        once: whether each slot is assigned once, for all microbatches, because its parameters are copied for it.
    """
    # Offloaded: one group, one worker per slot, so each slot's weights are copied once.
    if once:
        return _dispatch_groups(devices, seconds, microbatches, 1, 1)
    most = max(1, microbatches // min(devices, microbatches)) if microbatches else 1
    counts = sorted({1, 2, most, (most + 1) // 2} & set(range(1, most + 1)))
    tried = (
        _dispatch_groups(devices, seconds, microbatches, groups, sharing)
        for groups in counts
        for sharing in range(1, min(devices, _SHARING) + 1)
    )
    return min(tried, key=lambda candidate: candidate.makespan)


def _dispatch_groups(devices: int, seconds: Sequence[float], microbatches: int, groups: int, sharing: int) -> Dispatch:
    average = sum(seconds) / len(seconds)
    # A slot of three times the average is shared by three workers, up to the limit.
    workers_of = [min(sharing, max(1, round(took / average))) if average else 1 for took in seconds]
    free = [0.0] * devices
    runs: list[tuple[int, range, int]] = []
    turn = 0
    for group in range(groups):
        start, end = group * microbatches // groups, (group + 1) * microbatches // groups
        ready = [0.0] * (end - start)
        for slot, took in enumerate(seconds):
            first = ready[0]
            # The worker that is free first; among equals the next one in turn, so that stages go round.
            order = sorted(range(devices), key=lambda device: (max(free[device], first), (device - turn) % devices))
            chosen = order[: min(workers_of[slot], end - start)]
            turn = (chosen[-1] + 1) % devices
            # Microbatches of the group alternate between the workers that share the slot. `ready` is when each may go
            # on.
            for index, arrival in enumerate(ready):
                worker = chosen[index % len(chosen)]
                clock = free[worker]
                ready[index] = free[worker] = (arrival if arrival > clock else clock) + took
            runs += [(slot, range(start + i, end, len(chosen)), worker) for i, worker in enumerate(chosen)]
    return Dispatch(tuple(runs), max(free))


def round_robin(
    devices: int,
    fused: int,
    slots: int,
    microbatches: int,
    seconds: Sequence[float] | None = None,
    once: bool = False,
) -> Schedule:
    """RoundPipe's schedule: slots dispatched for groups of microbatches.

    Args:
        fused: index of the slot that runs the end of the forward and the beginning of the backward.
        slots: number of slots; backward slots are numbered on from the forward slots.
        seconds: of each slot, for one microbatch; ``None``: all equal.
        once: whether each slot is assigned once, for all microbatches.
    """
    orders: list[list[Action]] = [[] for _ in range(devices)]
    for slot, batches, worker in dispatch(devices, seconds or [1.0] * slots, microbatches, once).runs:
        kinds = [
            kind for kind, has in ((ActionKind.FORWARD, slot <= fused), (ActionKind.BACKWARD, slot >= fused)) if has
        ]
        orders[worker] += [Action(kind, slot, microbatch) for microbatch in batches for kind in kinds]
    return Schedule.of("roundpipe", orders)


def _build(
    devices: int,
    stages: int,
    microbatches: int,
    slots: int | None = None,
    seconds: Sequence[float] | None = None,
    once: bool = False,
) -> Schedule:
    """The schedule of so many forward slots, the last of which is fused; without ``slots`` as many run back."""
    return round_robin(devices, stages - 1, slots or 2 * stages - 1, microbatches, seconds, once)


ROUNDPIPE = ScheduleSpec(
    "roundpipe",
    _build,
    dispatches=True,
    about="stages are dispatched to a pool of devices in turn; several devices share a heavy stage",
)
