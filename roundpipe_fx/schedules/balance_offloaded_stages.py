"""Balance the slots of a model that stays on the host, whose weights are copied for each slot.

A slot is one residency window: all microbatches run through it, one after another, while the next slot's weights are
copied. With fewer slots there are fewer copies and shorter waits; with more slots less of the model is on the device at
one time. Slots are balanced by their compute time for all microbatches plus the time of their copies; forward and
backward are divided independently, as in :mod:`roundpipe_fx.schedules.roundpipe_partition`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from roundpipe_fx.schedules.roundpipe_partition import FUSED, RoundPipePartition, make_divider, slot_seconds

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of slots that are tried."""
_ALIKE = 1.002
"""Partitions whose estimated steps differ by less are as good as each other."""


@dataclass(frozen=True)
class Weights:
    """The tensors of a model on the host that each segment reads.

    Attributes:
        reads: for each segment, numbers of tensors.
        bandwidth: bytes per second between the host and a device.
    """

    reads: Sequence[frozenset[int]]
    bytes: Mapping[int, int]
    bandwidth: float

    def of(self, first: int, last: int) -> frozenset[int]:
        """Numbers of the tensors that segments ``first`` to ``last`` read."""
        return frozenset().union(*self.reads[first : last + 1])

    def size(self, tensors: frozenset[int]) -> int:
        """Total bytes of some tensors."""
        return sum(self.bytes[tensor] for tensor in tensors)


def balance_offloaded_stages(
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    recompute: bool,
    devices: int,
    microbatches: int,
    weights: Weights,
    limit: int | None,
) -> RoundPipePartition:
    """Of the partitions that fit a limit of bytes per device and have about the shortest estimated step, the one that
    takes the fewest bytes.

    Args:
        forward_seconds: of each segment, for one microbatch.
        backward_seconds: likewise, without recomputation; all zero: there is no backward.
        recompute: whether backward slots run the forward again.
        weights: the tensors that segments read.
        limit: bytes that weights and their gradients may take on a device at one time. If it is ``None``, or no
            partition fits, the partition that takes the fewest bytes is returned.
    """
    forward = list(forward_seconds)
    training = any(backward_seconds)
    recomputing = [b + (f if recompute else 0.0) for f, b in zip(forward, backward_seconds, strict=True)]
    bring = [weights.size(numbers) / weights.bandwidth for numbers in weights.reads]
    # Compute for all microbatches, plus the time in which the weights arrive (and, in the backward, gradients leave).
    ahead = [microbatches * f + b for f, b in zip(forward, bring, strict=True)]
    back = [microbatches * a + 2 * b for a, b in zip(recomputing, bring, strict=True)]
    tried_divisions = []
    for index, tried in enumerate(_divisions(ahead, back if training else [], devices)):
        slots = slot_seconds(tried, forward, list(backward_seconds), recomputing)
        size = residency_bytes(tried, devices, weights, training)
        tried_divisions.append(
            (_seconds(tried, slots, devices, microbatches, weights, training), size, tried.slots, index, tried)
        )
    fitting = [division for division in tried_divisions if limit is not None and division[1] <= limit]
    if fitting:
        shortest = min(fitting)[0]
        # What weights do not take is there for saved values, and between more slots more of these may leave.
        alike = [division for division in fitting if division[0] <= _ALIKE * shortest]
        return min(alike, key=lambda division: division[1:])[-1]
    return min(tried_divisions, key=lambda division: (division[1], division[2], division[0]))[-1]


def residency_bytes(partition: RoundPipePartition, devices: int, weights: Weights, training: bool = True) -> int:
    """Peak bytes of weights and their gradients on a device, with slots assigned to devices in turn."""
    reads = _reads(partition, weights)
    fused = len(partition.forward)
    gradients = [weights.size(numbers) if training and slot >= fused else 0 for slot, numbers in enumerate(reads)]
    most = 0
    for slot, numbers in enumerate(reads):
        # On a device: this slot's weights, the next one's that are copied meanwhile, and gradients of this slot and of
        # the one before.
        following: frozenset[int] = reads[slot + devices] if slot + devices < len(reads) else frozenset()
        before = gradients[slot - devices] if slot >= devices else 0
        most = max(most, weights.size(numbers | following) + gradients[slot] + before)
    return most


def _reads(partition: RoundPipePartition, weights: Weights) -> list[frozenset[int]]:
    return [weights.of(*run) for run in (*partition.forward, partition.fused, *partition.backward)]


def _seconds(
    partition: RoundPipePartition,
    slots: Sequence[float],
    devices: int,
    microbatches: int,
    weights: Weights,
    training: bool,
) -> float:
    """Estimated seconds of a step: a slot takes the longest of its compute time and of its concurrent copies."""
    reads = _reads(partition, weights)
    fused = len(partition.forward)
    total = longest = 0.0
    nothing: frozenset[int] = frozenset()
    for slot, (numbers, following) in enumerate(zip_longest(reads, reads[devices:], fillvalue=nothing)):
        # Shared tensors (tied embeddings) that stay from one slot to the next are not copied again.
        comes = weights.size(following - numbers)
        goes = weights.size(numbers) if training and slot >= fused else 0
        total += max(microbatches * slots[slot], comes / weights.bandwidth, goes / weights.bandwidth)
        longest = max(longest, slots[slot])
    return weights.size(reads[0]) / weights.bandwidth + total / devices + (devices - 1) * longest


def _divisions(forward: list[float], backward: list[float], devices: int) -> Iterator[RoundPipePartition]:
    count = len(forward)
    divide = make_divider(forward, backward)
    yield RoundPipePartition((), (0, count - 1), ())  # a single slot
    for first in range(count - 1, max(0, count - 1 - FUSED), -1):
        counts = sorted({fewer for fewer in _COUNTS if fewer < first} | {first})
        for slots in counts:
            for slots_back in counts if backward else [0]:
                if slots + 1 + slots_back >= devices:
                    yield divide(first, slots, slots_back)
