"""RoundPipe's dispatch: stages are not bound to devices but handed to a pool of them in turn.

RoundPipe (thustorage/RoundPipe) treats devices as workers without state of their own. The forward and the backward are
cut into slots independently, so that each takes about the same time however uneven the layers are; the last forward
slot runs its own backward at once. Slot s runs on device s modulo p, all microbatches one after another, while the next
device has begun with the next slot. With equal slots the devices idle only while the first round starts and the last
one ends: p - 1 slots of one microbatch.
"""

from __future__ import annotations

import numpy as np

from roundpipe_fx.schedules.action import Kind
from roundpipe_fx.schedules.blocks import block_of, pairs
from roundpipe_fx.schedules.schedule import Schedule

__all__ = ["round_robin"]


def round_robin(devices: int, fused: int, slots: int, microbatches: int) -> Schedule:
    """Slot by slot, each for all microbatches.

    Args:
        devices: how many.
        fused: the slot that runs the forward's end and the backward's beginning.
        slots: how many there are, those of the backward counted on from the forward's.
        microbatches: how many.
    """
    orders: list[list[np.ndarray]] = [[] for _ in range(devices)]
    for slot in range(slots):
        forward = block_of(Kind.FORWARD, [slot], microbatches)
        backward = block_of(Kind.BACKWARD, [slot], microbatches)
        order = pairs(forward, backward, 1) if slot == fused else forward if slot < fused else backward
        orders[slot % devices].append(order)
    empty = block_of(Kind.FORWARD, [], microbatches)
    return Schedule("roundpipe", tuple(np.concatenate([empty, *order]) for order in orders))
