"""Sharded parameters under a schedule: when a device has them whole, and their gradients; and what stays gathered.

Replicas of a device each have some rows of its parameters. They are whole there like the tensors of an offloaded model
are on their device: during the residency windows that read them, and the one before
(:mod:`roundpipe_fx.schedules.residency`). In between they may stay, if there is memory for it. Their gradients are
whole from the first action that adds to them until they are reduced to rows, stage by stage, each when the next one's
are complete::

    windows          F0      F1      F2      B2      B1      B0
    parameters of 0  ████████ · · · · · · · · · · · · ████████    kept: ████████████████, one gather less
    gradients of 2                           ████████             and rows until the end

A gather is saved by holding its bytes for as many actions as the parameters would be dropped for. So the shortest of
these times are taken first; where all parameters have one size and memory is the same everywhere, that keeps most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roundpipe_fx.schedules.action import ActionKind, StageAction
from roundpipe_fx.schedules.data_parallel import Gather, buckets_of
from roundpipe_fx.schedules.residency import resident, window_ranges


@dataclass(frozen=True, kw_only=True)
class ShardedCosts:
    """Costs of sharded parameters.

    Attributes:
        replicas: among how many devices each is shared out.
        whole_bytes: bytes of each parameter as a whole, by its number, with the padding that makes all parts equal.
        reads: the parameters that have to be whole for a stage action, by number: those that it reads, or views of
            which it reads.
    """

    replicas: int
    whole_bytes: Mapping[int, int]
    reads: Mapping[StageAction, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGathered:
    """Parameters of a stage that stay gathered where they would be dropped and gathered again.

    Attributes:
        device: number of the device.
        stage: the stage that reads them next.
        dropped: position in the device's order before which they would be dropped.
        regathered: position before which they would be gathered again.
    """

    device: int
    stage: int
    parameters: tuple[int, ...]
    bytes: int
    dropped: int
    regathered: int


@dataclass(frozen=True, kw_only=True)
class DeviceOrder:
    """The actions of one device.

    Attributes:
        steps: the stage action of each of its actions.
        turn: position of the first action of the backward half of a step, before which everything is dropped.
    """

    device: int
    steps: Sequence[StageAction]
    turn: int = 0


def _windows(order: DeviceOrder, costs: ShardedCosts) -> Iterator[list[tuple[range, set[int], set[int]]]]:
    """For each half of a step, its residency windows: positions, parameters that are read, and those that are there."""
    stages = np.array([stage for _, stage in order.steps], dtype=np.int64)
    # Forwards and backwards that are two runs keep nothing from one to the other: each half is looked at by itself.
    for start, end in ((0, order.turn), (order.turn, len(stages))):
        positions = [range(part.start + start, part.stop + start) for part in window_ranges(stages[start:end])]
        steps = [{order.steps[position] for position in window} for window in positions]
        reads = [{number for step in of_window for number in costs.reads.get(step, ())} for of_window in steps]
        yield list(zip(positions, reads, resident(reads), strict=True))


def find_gaps(order: DeviceOrder, costs: ShardedCosts) -> list[KeptGathered]:
    """All that may stay gathered on a device: what is dropped and gathered again within a half of a step."""
    numbers_of_gap: dict[tuple[int, int, int], list[int]] = {}
    for windows in _windows(order, costs):
        # By parameter, the position behind its last window.
        left: dict[int, int] = {}
        for index, (positions, reads, there) in enumerate(windows):
            # What is prefetched for the next window is there one window before it is read.
            for number in sorted(there):
                dropped = left.get(number, positions.start)
                if dropped < positions.start:
                    reader = positions if number in reads else windows[index + 1][0]
                    stage = order.steps[reader.start][1]
                    numbers_of_gap.setdefault((dropped, positions.start, stage), []).append(number)
                left[number] = positions.stop
    return [
        KeptGathered(
            device=order.device,
            stage=stage,
            parameters=tuple(numbers),
            bytes=sum(costs.whole_bytes[number] for number in numbers),
            dropped=dropped,
            regathered=regathered,
        )
        for (dropped, regathered, stage), numbers in numbers_of_gap.items()
    ]


def choose_kept(gaps: Sequence[KeptGathered], action_bytes: Sequence[np.ndarray], limit: int) -> list[KeptGathered]:
    """Choose what stays gathered: the shortest times first; of equal ones, what saves most bytes.

    Args:
        gaps: all that may stay.
        action_bytes: for each device, the bytes allocated there during each of its actions if nothing stays.
        limit: bytes that a device may hold at any position of its order.
    """
    left = [limit - during.astype(np.int64) for during in action_bytes]
    chosen = []
    for gap in sorted(gaps, key=lambda gap: (gap.regathered - gap.dropped, -gap.bytes, gap.device, gap.dropped)):
        # Short gaps first: each saves one gather however long it is, and takes memory for as long as it lasts.
        # `spare` is a view: taking from it lowers what is left for later choices.
        spare = left[gap.device][gap.dropped : gap.regathered]
        if (spare >= gap.bytes).all():
            spare -= gap.bytes
            chosen.append(gap)
    return sorted(chosen, key=lambda gap: (gap.device, gap.dropped, gap.regathered, gap.stage))


def gathers_of(order: DeviceOrder, costs: ShardedCosts, kept: Sequence[KeptGathered]) -> list[Gather]:
    """Bytes that a device gathers, window by window: :func:`roundpipe_fx.runtime.prefetch.prefetch_steps_of` as bytes.

    Args:
        kept: what stays gathered on it.
    """
    dropped: dict[int, list[KeptGathered]] = {}
    for gap in kept:
        dropped.setdefault(gap.dropped, []).append(gap)
    gathers: list[Gather] = []
    for windows in _windows(order, costs):
        before: set[int] = set()
        staying: list[KeptGathered] = []
        for index, (positions, reads, there) in enumerate(windows):
            # A gap that is kept ends before the window at which it would have been gathered again.
            staying = [gap for gap in (*staying, *dropped.get(positions.start, ())) if gap.regathered > positions.start]
            there = there | {number for gap in staying for number in gap.parameters}
            first = set() if index else reads
            # Three disjoint parts: there already, read now (waited for), read next (prefetched).
            parts = (sorted(first), sorted(there - before - first))
            gathers.append(
                Gather(positions.start, *(tuple(costs.whole_bytes[number] for number in part) for part in parts))
            )
            before = there
    return gathers


def gathered_bytes(order: DeviceOrder, costs: ShardedCosts, kept: Sequence[KeptGathered]) -> int:
    """Bytes that a device gathers in a step, its own rows included.

    Args:
        kept: what stays gathered on it.
    """
    return sum(sum(gather.first) + sum(gather.ahead) for gather in gathers_of(order, costs, kept))


def sharded_changes(
    order: DeviceOrder,
    costs: ShardedCosts,
    gradients: Mapping[StageAction, Mapping[int, int]],
    late: set[int],
    kept: Sequence[KeptGathered],
) -> np.ndarray:
    """Changes of the bytes of a device, by position, beside the whole gradients of a step.

    Args:
        gradients: bytes of the gradients of parameters that stage actions add to, by number. They are counted from the
            first of these actions to the end of the step.
        late: numbers of the parameters whose gradients are reduced at the end of the step.
        kept: what stays gathered on the device.
    """
    change = np.zeros(len(order.steps) + 2, dtype=np.int64)
    for windows in _windows(order, costs):
        for positions, _, there in windows:
            size = sum(costs.whole_bytes[number] for number in there)
            change[positions.start] += size
            change[positions.stop] -= size
    # Kept parameters are there in the gap as well.
    for gap in kept:
        change[gap.dropped] += gap.bytes
        change[gap.regathered] -= gap.bytes
    shared = {
        step: {number: size for number, size in of_step.items() if number in costs.whole_bytes}
        for step, of_step in gradients.items()
    }
    buckets = buckets_of(order.steps, shared, late)
    for index, bucket in enumerate(buckets):
        whole = sum(costs.whole_bytes[number] for number in bucket.sizes)
        # Reducing takes the padding, and this replica's rows, beside the whole gradients; the rows stay.
        change[bucket.position + 1] += whole - sum(bucket.sizes.values()) + whole // costs.replicas
        if index + 1 < len(buckets):  # the last one is waited for at the end
            change[buckets[index + 1].position + 1] -= whole
    return change


def late_gradients(orders: Sequence[DeviceOrder], gradients: Mapping[StageAction, Mapping[int, int]]) -> set[int]:
    """Numbers of the parameters whose gradients are known only at the end of a step: several devices add to them, or
    the forward computes them.

    Args:
        gradients: bytes of gradients by stage action and number.
    """
    adding = Counter(
        number
        for order in orders
        for number in {number for step in set(order.steps) for number in gradients.get(step, ())}
    )
    # A forward's gradients are those of inputs that the forward returns: they are not part of any bucket.
    early = {number for (kind, _), of_step in gradients.items() if kind is ActionKind.FORWARD for number in of_step}
    return early | {number for number, devices in adding.items() if devices > 1}


def padded_bytes(value: torch.Tensor, parts: int) -> int:
    """Bytes of a tensor padded so that its rows divide into equal parts."""
    rows = -(-value.shape[0] // parts) * parts if value.dim() else 1
    return rows * math.prod(value.shape[1:]) * value.element_size()
