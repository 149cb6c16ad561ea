"""Choose the values that a step offloads: as few bytes as bring each device within its limit.

An offload lowers the bytes of its device between two positions, so this is a covering of positions by intervals. Where
all values have the same size, going through the positions and taking at each one over the limit the value that stays
away longest is optimal (Belady, 1966, for pages); with different sizes it is a heuristic. In the end, offloads that
later choices have made superfluous are dropped.

This rule picks the values that were computed first, so the link is busy at the beginning of a step and idle in the
middle, where a device holds most. If devices wait for that reason, it is better to send a part of each action's values,
as much as the link can carry meanwhile. The rule *in time* goes through the positions and offloads each value whose
copy ends before its memory must be free; further values are offloaded only if the limit cannot be met otherwise. ::

    values made          ████ ████ ████ ████ ████ ░ the link carries ¾ of them
    away longest         ████ ████ ████ ▒▒          sent late: devices wait for the copies of the first three
    in time              ███  ███  ███  ███  ██     as many bytes, and no waits
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roundpipe_fx.schedules.offloads import Offload, offloads_at_distance
from roundpipe_fx.schedules.step_costs import StepCosts
from roundpipe_fx.schedules.timing import Timing


@dataclass(frozen=True)
class OffloadRule:
    """Rule that decides which values leave: the same for every number of microbatches.

    Attributes:
        limit: bytes that a device may allocate at any position of its order.
        distance: number of actions beside which a value is copied, in each direction.
        in_time: whether values leave whose copies end in time, rather than those that stay away longest.
    """

    limit: int
    distance: int
    in_time: bool = False


def offloads_within(
    timing: Timing, costs: StepCosts, others: Mapping[int, StepCosts], rule: OffloadRule
) -> list[Offload]:
    """Choose offloads by a rule, together with those that the user requests.

    Args:
        timing: of the schedule if nothing leaves.
        costs: of the stage actions.
        others: costs of microbatches of another size, by index.
    """
    if max(timing.peak_bytes) <= rule.limit and not costs.wanted_on_host:
        return []
    may, must = offloads_at_distance(timing.schedule, costs, others, rule.distance)
    during = [sizes.astype(np.int64) for sizes in timing.action_bytes]
    # What the user wants on the host leaves in any case, and makes room.
    for offload in must:
        during[offload.device][offload.freed : offload.reloads] -= offload.bytes
    if not rule.in_time:
        return sorted([*must, *choose_offloads(may, during, rule.limit)], key=_offload_order)
    assert costs.host_bandwidth is not None
    chosen = list(must)
    for device, (left, starts, ends) in enumerate(zip(during, timing.starts, timing.ends, strict=True)):
        link = _OutgoingLink(starts, ends, costs.host_bandwidth)
        candidates = [offload for offload in may if offload.device == device]
        covering = _cover_in_time(
            candidates, [offload for offload in must if offload.device == device], left, rule.limit, link
        )
        chosen += _drop_superfluous(covering, left, rule.limit)
    return sorted(chosen, key=_offload_order)


def choose_offloads(candidates: Sequence[Offload], action_bytes: Sequence[np.ndarray], limit: int) -> list[Offload]:
    """The values that leave. Positions that no candidate can bring within the limit get as near to it as possible.

    Args:
        candidates: all that may leave; times of one value do not overlap.
        action_bytes: for each device, the bytes allocated there during each of its actions, with everything present.
    """
    chosen: list[Offload] = []
    for device, during in enumerate(action_bytes):
        left = during.astype(np.int64)
        covering = _cover([tried for tried in candidates if tried.device == device], left, limit)
        chosen += _drop_superfluous(covering, left, limit)
    return sorted(chosen, key=_offload_order)


def _offload_order(offload: Offload) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
    return offload.device, offload.leaves, offload.microbatch, offload.values


def _cover(candidates: Sequence[Offload], left: np.ndarray, limit: int) -> list[Offload]:
    """Offloads that lower ``left`` to the limit, position by position."""
    waiting = sorted(range(len(candidates)), key=lambda index: candidates[index].freed, reverse=True)
    latest_reload: list[tuple[int, int, int]] = []
    chosen: list[Offload] = []
    for position in range(len(left)):
        # Sweep over positions: candidates become available once their memory is free. The heap is by the latest reload.
        while waiting and candidates[waiting[-1]].freed <= position:
            index = waiting.pop()
            heapq.heappush(latest_reload, (-candidates[index].reloads, -candidates[index].bytes, index))
        # Belady: the one that stays away longest covers this position and most of what follows.
        while left[position] > limit and latest_reload and -latest_reload[0][0] > position:
            offload = candidates[heapq.heappop(latest_reload)[2]]
            left[offload.freed : offload.reloads] -= offload.bytes
            chosen.append(offload)
    return chosen


class _OutgoingLink:
    """The link from a device to the host, while its copies are chosen one after another.

    Args:
        starts: seconds at which the device's actions start, if nothing leaves.
        ends: seconds at which they end.
        bandwidth: bytes per second from the device to the host.
    """

    def __init__(self, starts: np.ndarray, ends: np.ndarray, bandwidth: float) -> None:
        self._starts, self._ends, self._bandwidth = starts, ends, bandwidth
        self._free = 0.0

    def is_in_time(self, offload: Offload) -> bool:
        """Return whether the copy of a value, after those sent so far, ends before the device waits for it."""
        return self._copied(offload) <= self._starts[offload.freed]

    def send(self, offload: Offload) -> None:
        """Send a value."""
        self._free = self._copied(offload)

    def _copied(self, offload: Offload) -> float:
        # Behind the last copy, and behind the action that makes the value.
        """Seconds at which a value would be on the host."""
        return max(self._free, float(self._ends[offload.leaves - 1])) + offload.bytes / self._bandwidth


def _cover_in_time(
    candidates: Sequence[Offload], must: Sequence[Offload], left: np.ndarray, limit: int, link: _OutgoingLink
) -> list[Offload]:
    """Offloads that lower ``left`` to the limit, if possible such that the device does not wait for copies to the host.

    Args:
        candidates: all that may leave.
        must: what leaves in any case; ``left`` is without it.
        left: by position, the bytes that are there; lowered by what leaves.
        link: with no copies yet.
    """
    leaving: list[tuple[int, int, int, Offload]] = []
    leaving += [(offload.leaves, 0, position, offload) for position, offload in enumerate(must)]
    leaving += [(offload.leaves, 1, position, offload) for position, offload in enumerate(candidates)]
    leaving.sort(key=lambda item: item[:3], reverse=True)
    late: list[tuple[int, int, int]] = []
    chosen: list[Offload] = []

    def send(offload: Offload) -> None:
        link.send(offload)
        left[offload.freed : offload.reloads] -= offload.bytes
        chosen.append(offload)

    for position in range(len(left)):
        while leaving and leaving[-1][0] <= position:
            _, may_stay, index, offload = leaving.pop()
            if not may_stay:
                link.send(offload)
            elif (left[offload.freed : offload.reloads] > limit).any():
                # Only values whose absence covers a position over the limit are worth a copy.
                if link.is_in_time(offload):
                    send(offload)
                else:
                    heapq.heappush(late, (-offload.reloads, -offload.bytes, index))
        if left[position] > limit:
            # The limit cannot be met in time: late copies are sent too, those that stay away longest first.
            not_yet = []
            while left[position] > limit and late and -late[0][0] > position:
                item = heapq.heappop(late)
                if candidates[item[2]].freed <= position:
                    send(candidates[item[2]])
                else:
                    not_yet.append(item)
            for item in not_yet:
                heapq.heappush(late, item)
    return chosen


def _drop_superfluous(chosen: Sequence[Offload], left: np.ndarray, limit: int) -> list[Offload]:
    """Drop superfluous offloads, unless a position would exceed the limit, or exceed it by more."""
    needed = []
    # Shortest absence first: it is the one most likely covered by others.
    for offload in sorted(chosen, key=lambda offload: offload.reloads - offload.freed):
        during_absence = left[offload.freed : offload.reloads]
        if (during_absence + offload.bytes <= limit).all():
            during_absence += offload.bytes
        else:
            needed.append(offload)
    return needed
