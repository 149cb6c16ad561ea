"""Offloads: values that leave a device for the host between two of their readers, and come back in time.

What crosses from the forward of a stage to its backward is multiplied by the microbatches in flight. Meanwhile such
values can be on the host. Each offload names four positions in the order of its device, all of them *before* an
action::

    actions   │ F0.1 │ F0.2 │ F0.3 │   …   │ B0.3 │ B0.2 │ B0.1 │
    value     made   ├──────┤                     ├──────┤ read
                 leaves   freed                reloads   back
    device    ██████████████         ⋯            ██████████████     in flight it counts as present
    host             ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░

Between ``leaves`` and ``freed`` it is copied to the host, beside the device's work; the device waits for the end of the
copy at ``freed``, so memory does not depend on how fast the link is, only time does. ``reloads`` and ``back`` likewise.
Where all forwards run before all backwards, each copy belongs to one half of the step, and a value that other devices
read stays: they would get it in the other half.
Activations are offloaded so by vDNN (Rhu et al., 2016), ZeRO-Infinity (Rajbhandari et al., 2021) and RoundPipe
(thustorage/RoundPipe).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from roundpipe_fx.schedules.action import ActionKind
from roundpipe_fx.schedules.step_costs import StepCosts, backward_start
from roundpipe_fx.schedules.timetable import KINDS, Schedule

_FORWARD = KINDS.index(ActionKind.FORWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """A value, or several of the same stage action and microbatch, that leave a device for a while.

    Positions are those of actions in the order of the device, before which something happens.

    Attributes:
        device: number of the device.
        microbatch: index of the microbatch.
        values: numbers of the values, with the bytes of each.
        leaves: the copies to the host begin.
        freed: the device waits for these copies, and frees its memory.
        reloads: memory is allocated again, and the copies to the device begin.
        back: the device waits for these copies; the action reads the values.
    """

    device: int
    microbatch: int
    values: tuple[tuple[int, int], ...]
    leaves: int
    freed: int
    reloads: int
    back: int

    @property
    def bytes(self) -> int:
        """Bytes of the values together."""
        return sum(size for _, size in self.values)


def offloads_at_distance(
    schedule: Schedule, costs: StepCosts, others: Mapping[int, StepCosts], distance: int
) -> tuple[list[Offload], list[Offload]]:
    """All offloads that are possible: one for each time between two readers of a value on the device that makes it.

    Args:
        schedule: the actions of each device.
        costs: of the stage actions.
        others: costs of microbatches of another size, by index.
        distance: number of actions beside which a value is copied, in each direction.

    Returns:
        those that may be made, and those that must, from the forward to the backward, which are copied beside fewer
        actions where there are no more.
    """
    may: list[Offload] = []
    must: list[Offload] = []
    for device, order in enumerate(schedule.orders):
        # The position of the first backward: 0 where forwards and backwards alternate, which no offload then crosses.
        turn = backward_start(order, schedule)
        of_batch: dict[int, dict[tuple[int, int], int]] = {}
        for position, (kind, stage, batch) in enumerate(order.tolist()):
            of_batch.setdefault(batch, {})[kind, stage] = position
        for batch, positions in of_batch.items():
            of_this = others.get(batch, costs)
            # Microbatches of another size have costs of their own.
            for held in of_this.held:
                maker = positions.get((KINDS.index(held.maker[0]), held.maker[1]))
                if maker is None or not held.values or held.lasts:
                    continue
                readers = [(KINDS.index(kind), stage) for kind, stage in held.readers]
                if schedule.forwards_before_backwards and any(reader not in positions for reader in readers):
                    continue
                # All actions of this device that use the value, in order: between any two of them it may be away.
                uses = sorted({maker, *(positions[reader] for reader in readers if reader in positions)})
                for last, following in pairwise(uses):
                    # Each copy overlaps with `overlapped` actions, and between the copies at least one action must see
                    # the memory free: ``2·overlapped + 2 ≤ following - last``.
                    most = (following - last - 2) // 2
                    # Where a loss outside stands between the halves, the copy to the host ends before it, and the copy
                    # back begins after it.
                    if last < turn <= following:
                        most = min(most, turn - last - 1, following - turn)
                    wanted = held.values[0][0] in of_this.wanted_on_host
                    must_leave = wanted and order[last, 0] == _FORWARD != order[following, 0]
                    # Not so many actions lie between the uses: the offload at this distance is left out, unless the
                    # plan counts on it.
                    if most < 0 or (distance > most and not must_leave):
                        continue
                    overlapped = min(distance, most)
                    offload = Offload(
                        device=device,
                        microbatch=batch,
                        values=held.values,
                        leaves=last + 1,
                        freed=last + 1 + overlapped,
                        reloads=following - overlapped,
                        back=following,
                    )
                    (must if must_leave else may).append(offload)
    return may, must


def buffer_bytes(
    offloads: Sequence[Offload], lengths: Sequence[int], allocated_bytes: Callable[[int], int]
) -> list[int]:
    """For each device, bytes of the buffers on the host that hold its offloaded values.

    A buffer serves values of its size, on its device, one after another: from the position at which a value leaves to
    the one at which it is back, where others have left already.

    Args:
        lengths: number of actions of each device.
        allocated_bytes: bytes that a buffer of a size takes.
    """
    changes: dict[tuple[int, int], Counter[int]] = {}
    for offload in offloads:
        for _, size in offload.values:
            change = changes.setdefault((offload.device, size), Counter())
            change[offload.leaves] += 1
            # The buffer is free again after the action before which the value is back.
            change[offload.back + 1] -= 1
    bytes_of = [0] * len(lengths)
    for (device, size), change in changes.items():
        levels = np.zeros(lengths[device] + 1, dtype=np.int64)
        for position, count in change.items():
            # Starts minus ends, summed up: how many values are on the host before each action. The peak is the number
            # of buffers.
            levels[position] += count
        bytes_of[device] += int(np.cumsum(levels).max()) * allocated_bytes(size)
    return bytes_of
