"""Hidden copies: offload the values that the link can carry both ways before anything waits for them.

In the forward, values are copied in the order in which they are computed, while later stages run. In the backward they
return in the order in which they are read. A value stays if its copy would not end before the forward does, or would
return late. So, by the modelled seconds, nothing waits for a copy, and the freed memory lets other values be saved
instead of recomputed. ::

    device   F0      F1      F2      F3      B3      B2      B1      B0
    link          └ of 0 ──┘└ of 1 ──┘              └ of 1 ──┘└ of 0 ──┘

Values of the first stages are offloaded first, since they are unused for the longest time, until enough bytes are
freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from roundpipe_fx.ir.decisions import ValueOnHost


@dataclass(frozen=True, kw_only=True)
class OffloadCandidate:
    """A value that may be on the host between forward and backward.

    Attributes:
        value: name of the value in the graph.
        maker: name of the stage module of the forward that computes it.
        readers: names of the stage modules that read it.
        requested: whether the user wants it there.
    """

    value: str
    name: str
    bytes: int
    maker: str
    readers: tuple[str, ...]
    requested: bool = False


@dataclass(frozen=True)
class _HiddenOffload:
    """A value whose copy to the host is hidden.

    Attributes:
        freed: number of the call of the forward during which the copy ends.
        back: number of the call of the backward that reads it first.
    """

    value: OffloadCandidate
    freed: int
    back: int


def choose_hidden_copies(
    values: Sequence[OffloadCandidate],
    forward: Sequence[tuple[str, float]],
    backward: Sequence[tuple[str, float]],
    stage_starts: Sequence[int],
    byte_seconds: float,
    bytes_wanted: int,
    host_limit: int,
) -> list[ValueOnHost]:
    """Choose the values that leave; those that are read first come first.

    Args:
        forward: name and seconds of each call.
        stage_starts: for each call of the backward, the number of the first call of its stage.
        byte_seconds: in which the link carries a byte.
        bytes_wanted: no more values leave once they have this number of bytes.
        host_limit: bytes of pinned memory that they have at most.
    """
    positions = {name: position for position, (name, _) in enumerate(backward)}
    offloaded = _choose_offloads(values, forward, positions, byte_seconds, bytes_wanted, host_limit)
    # Backwards in time: each copy back ends when its stage begins, or when the link is needed by a later one.
    begins = [0.0, *accumulate(seconds for _, seconds in backward)]
    link = begins[-1]
    copies = []
    # The last one to come back first, from the end of the step.
    for leaving in sorted(offloaded, key=lambda offload: -offload.back):
        link = min(begins[leaving.back], link) - leaving.value.bytes * byte_seconds
        if link < 0:
            break  # all others are read earlier still
        # The copy begins during this call, and so before the stage that the call belongs to.
        during = max(position for position in range(leaving.back) if begins[position] <= link)
        reloaded = stage_starts[during]
        if leaving.freed == len(forward) - 1 and reloaded == 0:
            continue  # it would not be away while anything runs
        copies.append(
            ValueOnHost(
                value=leaving.value.value,
                name=leaving.value.name,
                freed=forward[leaving.freed][0],
                reloaded=backward[reloaded][0],
                back=backward[leaving.back][0],
            )
        )
    return copies[::-1]


def _choose_offloads(
    values: Sequence[OffloadCandidate],
    forward: Sequence[tuple[str, float]],
    backward: Mapping[str, int],
    byte_seconds: float,
    bytes_wanted: int,
    host_limit: int,
) -> list[_HiddenOffload]:
    """Choose the values whose copies to the host end before the forward does."""
    calls = {name: position for position, (name, _) in enumerate(forward)}
    ends = [*accumulate(seconds for _, seconds in forward)]
    by_maker: dict[int, list[OffloadCandidate]] = {}
    for value in values:
        by_maker.setdefault(calls[value.maker], []).append(value)
    # Forwards in time: `link` is when the link will be free.
    link, offloaded_bytes, pinned_bytes = 0.0, 0, 0
    offloaded: list[_HiddenOffload] = []
    for maker, candidates in sorted(by_maker.items()):
        # Values of one call leave together, until enough bytes have left or the host has no room.
        group = []
        for value in candidates:
            fits = offloaded_bytes < bytes_wanted and pinned_bytes + _pinned_bytes(value.bytes) <= host_limit
            if fits and any(reader in backward for reader in value.readers):
                group.append(value)
                offloaded_bytes += value.bytes
                pinned_bytes += _pinned_bytes(value.bytes)
        # Copies of one call's results follow each other in any order.
        link = max(link, ends[maker]) + sum(value.bytes for value in group) * byte_seconds
        # The call during which the copies end: there the memory is freed.
        over = next((position for position, end in enumerate(ends) if end >= link), None)
        if over is None:
            break
        for value in group:
            # Freed no earlier than behind the last reader of the forward.
            last = max([maker + 1, *(calls[reader] for reader in value.readers if reader in calls)])
            back = min(backward[reader] for reader in value.readers if reader in backward)
            if max(over, last) < len(forward) and back:
                offloaded.append(_HiddenOffload(value, max(over, last), back))
    return offloaded


def _pinned_bytes(size: int) -> int:
    """Bytes that PyTorch's allocator of pinned memory takes for a value: a power of two."""
    return 1 << (size - 1).bit_length()
