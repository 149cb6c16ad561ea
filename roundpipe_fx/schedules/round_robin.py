"""RoundPipe's dispatch: stages are not bound to devices but handed to a pool of them, one after another.

RoundPipe (thustorage/RoundPipe) treats devices as workers without state of their own. The forward and the backward
are cut into slots independently, so that each takes about the same time however uneven the layers are; the last
forward slot runs its own backward at once. A worker takes a slot for a group of microbatches, while the next worker
has begun with the next slot. With equal slots and groups of at least as many microbatches as there are workers, these
idle only while the first slots start and the last ones end.

Slots are handed out to the worker that will be free first, in turn among equals. A slot that is heavier than the rest
(a head that cannot be cut) would make all that follow wait, so its group may be shared out: to as many workers as it
is times as heavy as a slot on average. Groups of different sizes are tried, down to one microbatch a worker, and
different numbers of workers that may share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe_fx.schedules.action import Action, ActionKind
from roundpipe_fx.schedules.schedule import Schedule

__all__ = ["Dispatch", "dispatch", "round_robin"]

_SHARING = 4


@dataclass(frozen=True)
class Dispatch:
    """Which worker takes what.

    Attributes:
        runs: (slot, microbatches, worker), in the order in which they are handed out.
        makespan: seconds, transfers left out.
    """

    runs: tuple[tuple[int, range, int], ...]
    makespan: float


def dispatch(devices: int, seconds: Sequence[float], microbatches: int, once: bool = False) -> Dispatch:
    """The shortest dispatch among those by groups of different sizes.

    Args:
        devices: how many workers.
        seconds: of each slot, for one microbatch.
        microbatches: how many.
        once: whether a slot is handed out once, for all microbatches: what it reads has to be brought for it.
    """
    if once:
        return _by_groups(devices, seconds, microbatches, 1, 1)
    most = max(1, microbatches // min(devices, microbatches)) if microbatches else 1
    counts = sorted({1, 2, most, (most + 1) // 2} & set(range(1, most + 1)))
    tried = (
        _by_groups(devices, seconds, microbatches, groups, sharing)
        for groups in counts
        for sharing in range(1, min(devices, _SHARING) + 1)
    )
    return min(tried, key=lambda found: found.makespan)


def _by_groups(devices: int, seconds: Sequence[float], microbatches: int, groups: int, sharing: int) -> Dispatch:
    average = sum(seconds) / len(seconds)
    workers_of = [min(sharing, max(1, round(took / average))) if average else 1 for took in seconds]
    free = [0.0] * devices
    runs: list[tuple[int, range, int]] = []
    turn = 0
    for group in range(groups):
        start, end = group * microbatches // groups, (group + 1) * microbatches // groups
        ready = [0.0] * (end - start)
        for slot, took in enumerate(seconds):
            first = ready[0]
            order = sorted(range(devices), key=lambda own: (max(free[own], first), (own - turn) % devices))
            chosen = order[: min(workers_of[slot], end - start)]
            turn = (chosen[-1] + 1) % devices
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
    """Slots handed out for groups of microbatches.

    Args:
        devices: how many.
        fused: the slot that runs the forward's end and the backward's beginning.
        slots: how many there are, those of the backward counted on from the forward's.
        microbatches: how many.
        seconds: of each slot, for one microbatch; ``None``: all the same.
        once: whether a slot is handed out once.
    """
    orders: list[list[Action]] = [[] for _ in range(devices)]
    for slot, batches, worker in dispatch(devices, seconds or [1.0] * slots, microbatches, once).runs:
        kinds = [
            kind for kind, has in ((ActionKind.FORWARD, slot <= fused), (ActionKind.BACKWARD, slot >= fused)) if has
        ]
        orders[worker] += [Action(kind, slot, microbatch) for microbatch in batches for kind in kinds]
    return Schedule.of("roundpipe", orders)
