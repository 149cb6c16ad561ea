"""Replicas of a pipeline in the simulator: what they reduce and gather, when, and how many bytes it takes.

The gradients of a stage are a *bucket*, reduced as soon as its last microbatch has added to them, beside what the
device still runs; buckets are started from the last stage to the first. Where parameters are sharded across replicas, a
bucket is waited for before the next one is started, and what is gathered before which action is worked out in
:mod:`roundpipe_fx.schedules.sharding`. Small tensors travel as one, since each collective has a latency. This is what
the runtime does (:mod:`roundpipe_fx.distributed.averaging`, :mod:`roundpipe_fx.distributed.gathering`). All collectives
of a device run one after another, in the order in which they are started."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roundpipe_fx.analysis.cost.network import Ring
from roundpipe_fx.schedules.action import StageAction

SMALL_BYTES = 1 << 16
"""Sharded parameters of a stage below this are gathered as one tensor, and their gradients reduced as one."""

TOGETHER_BYTES = 1 << 22
"""Whole gradients of a bucket are put together in tensors of at most so many bytes; larger ones are reduced alone."""

_Sizes = Mapping[StageAction, Mapping[int, int]]


_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Replicas of a pipeline.

    Attributes:
        ring: the same device of all replicas.
        sharded: whether parameters and gradients are sharded across replicas.
    """

    ring: Ring
    sharded: bool

    def seconds(self, sizes: Iterable[int], seconds_of: Callable[[int], float]) -> float:
        """Seconds of collectives for some tensors, of which small ones travel together.

        Args:
            sizes: bytes of each tensor.
            seconds_of: seconds of a collective, by bytes.
        """
        sizes = [*sizes]
        return sum(
            seconds_of(sum(sizes[position] for position in positions)) for positions in bucketize(sizes, self.sharded)
        )

    def reduce_seconds(self, sizes: Iterable[int]) -> float:
        """Seconds of reducing gradients, of which each replica gets all or, if sharded, its part."""
        return self.seconds(sizes, self.ring.gather_seconds if self.sharded else self.ring.all_reduce_seconds)


def aligned_bytes(size: int) -> int:
    """Bytes of a gradient in a tensor with others. A kernel may add up a tensor in another order if it is not aligned,
    so each is aligned as the CPU's allocator aligns tensors."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def bucketize(sizes: Sequence[int], sharded: bool) -> list[list[int]]:
    """Which tensors of a stage travel as one: the positions of each group, in order.

    Args:
        sizes: bytes of each tensor.
        sharded: whether each replica has a part of each tensor. Small ones are then one group, whatever it has.
    """
    small, most = (SMALL_BYTES, None) if sharded else (TOGETHER_BYTES, TOGETHER_BYTES)
    groups: list[list[int]] = []
    current: list[int] = []
    held = 0
    for position, size in enumerate(sizes):
        # Large tensors travel alone. Others fill a group up to the limit; sharded ones have no limit, since a part of
        # each is small.
        if size >= small:
            groups.append([position])
            continue
        if most is not None and held + size > most:
            groups.append(current)
            current, held = [], 0
        current.append(position)
        held += size
    return [*groups, current] if current else groups


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        position: position of the action behind which they are reduced.
        sizes: bytes of each, by number of the parameter.
    """

    position: int
    sizes: Mapping[int, int]


@dataclass(frozen=True)
class Gather:
    """Tensors that are gathered before an action: at the beginning of a residency window.

    Attributes:
        position: position of the action.
        first: bytes of the parameters that this window waits for: what the first one of a half of a step reads.
        ahead: bytes of those that are gathered for the next window.
    """

    position: int
    first: tuple[int, ...]
    ahead: tuple[int, ...]


def buckets_of(steps: Sequence[StageAction], gradients: _Sizes, late: Collection[int] = ()) -> list[Bucket]:
    """The buckets of a device, in the order in which they are started.

    Args:
        steps: the stage action of each of its actions.
        gradients: bytes of the gradients that a stage action adds to, by number of the parameter.
        late: numbers of parameters whose gradients are reduced at the end of the step, in no bucket.
    """
    last: dict[int, int] = {}
    stage: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for position, step in enumerate(steps):
        for number, size in gradients.get(step, {}).items():
            if number not in late:
                last[number], sizes[number] = position, size
                stage[number] = min(stage.get(number, step[1]), step[1])
    buckets: list[Bucket] = []
    # The order of the buckets is that of the stages from the last one: the same on all replicas.
    for of_stage in sorted(set(stage.values()), reverse=True):
        of_bucket = {number: size for number, size in sizes.items() if stage[number] == of_stage}
        before = buckets[-1].position if buckets else 0
        buckets.append(Bucket(max(before, *(last[number] for number in of_bucket)), of_bucket))
    return buckets


class ReplicaLink:
    """State of all devices' links to their replicas while a schedule is simulated.

    Attributes:
        seconds: by device, how long its collectives take in all.
    """

    def __init__(
        self,
        parallel: DataParallel,
        gathers: Sequence[Sequence[Gather]],
        buckets: Sequence[Sequence[Bucket]],
        lengths: Sequence[int],
    ) -> None:
        """Start with no collective in progress.

        Args:
            gathers: what each device gathers; nothing unless parameters are sharded.
            lengths: number of actions of each device.
        """
        self._waits = parallel.sharded
        # One row per action: whether a window begins, seconds of its own gathers, of those ahead, of reductions started
        # behind the action before.
        rows = [np.zeros((length + 1, 4)) for length in lengths]
        for table, of_gathers, of_buckets in zip(rows, gathers, buckets, strict=True):
            for gather in of_gathers:
                parts = gather.first, gather.ahead
                table[gather.position, :3] = (
                    1,
                    *(parallel.seconds(part, parallel.ring.gather_seconds) for part in parts),
                )
            for bucket in of_buckets:
                table[bucket.position + 1, 3] += parallel.reduce_seconds(bucket.sizes.values())
        self.seconds = [float(table[:, 1:].sum()) for table in rows]
        self._table = np.concatenate([np.zeros((0, 4)), *(table[:-1] for table in rows)])
        self._last = np.array([table[-1, 3] for table in rows])
        self._free, self._gathered, self._reduced = np.zeros((3, len(lengths)))
        """By device, when all collectives that were started will have ended, the gathers, and the reductions."""

    def ready(self, devices: np.ndarray, positions: np.ndarray, clock: np.ndarray) -> np.ndarray:
        """Earliest start of actions as far as the replicas are concerned, in seconds.

        Args:
            devices: devices of the actions.
            positions: positions of the actions among those of all devices.
            clock: seconds at which the devices have finished their previous actions.
        """
        begins, first, ahead, reduced = self._table[positions].T
        free, ready = self._free[devices], np.zeros(len(devices))
        # Sharded buckets wait for each other, so that no more than two are whole at one time.
        if self._waits:  # for the bucket before the one that is started
            ready = np.where(reduced > 0, self._reduced[devices], ready)
        free = np.where(reduced > 0, np.maximum(free, np.maximum(clock, ready)) + reduced, free)
        self._reduced[devices] = np.where(reduced > 0, free, self._reduced[devices])
        # All collectives of a device share one queue (`free`), in the order in which they are issued.
        free = np.where(first > 0, np.maximum(free, clock) + first, free)
        gathered = np.where(first > 0, free, self._gathered[devices])
        ready = np.where(begins > 0, np.maximum(ready, gathered), ready)
        free = np.where(ahead > 0, np.maximum(free, np.maximum(clock, ready)) + ahead, free)
        self._gathered[devices] = np.where(ahead > 0, free, gathered)
        self._free[devices] = free
        return ready

    def all_left(self, clock: np.ndarray) -> float:
        """Seconds at which the last gradient has been reduced.

        Args:
            clock: seconds at which the devices have finished their last actions.
        """
        ends = np.where(self._last > 0, np.maximum(self._free, clock) + self._last, self._reduced)
        return float(ends.max(initial=0.0))
