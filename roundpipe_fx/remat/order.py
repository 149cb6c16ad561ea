"""order: in which order the steps of a segment's backward run, so that few bytes live at one time.

Ordering a graph of operations for least peak is NP-hard (Sethi, "Complete register allocation problems", 1975), so
this is a beam search: partial orders grow step by step, and of those that have run equally many the few with the
lowest peaks go on. A step that makes no more than it frees, at no new peak, is run at once: waiting gains nothing.
Partial orders that reach the peak of the order that is known are given up: it stands unless a better one is found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from roundpipe_fx.analysis.liveness import Event

__all__ = ["order_events"]

_WIDTH = 3
_LOOKED_AT = 2
"""Of so many times as many steps it is worked out what follows from them."""
_MOST_WORK = 300
"""Events times partial orders: long blocks are ordered with fewer at a time."""


@dataclass(slots=True, kw_only=True)
class _Partial:
    """A partial order."""

    peak: int
    live: int
    order: list[int]
    waiting: list[int]
    """By event, how many of the events it reads from have not run."""
    readers: dict[int, int]
    """By storage, how many events that read it have not run."""
    ready: list[int]


def order_events(
    events: Sequence[Event],
    sizes: Mapping[int, int],
    before: Collection[int],
    lasting: Collection[int],
    below: int,
    width: int = _WIDTH,
) -> list[int] | None:
    """An order of events whose peak is lower than one that is known.

    Args:
        events: in an order that is possible.
        sizes: bytes by storage.
        before: storages that live at the beginning and die when they are read for the last time.
        lasting: storages that live to the end.
        below: bytes: a peak that is known; partial orders that reach it are given up.
        width: how many partial orders go on.

    Returns:
        the positions of the events in the order found; ``None``: none was found.
    """
    maker = {storage: position for position, event in enumerate(events) for storage in event.makes}
    counted = {*maker, *before}
    users: list[list[int]] = [[] for _ in events]
    waiting = []
    readers: dict[int, int] = {storage: 1 if storage in lasting else 0 for storage in counted}
    for position, event in enumerate(events):
        sources = {maker[storage] for storage in event.reads if storage in maker}
        waiting.append(len(sources))
        for source in sources:
            users[source].append(position)
        for storage in event.reads:
            if storage in counted:
                readers[storage] += 1
    live = sum(sizes[storage] for storage in before if readers[storage])
    rooms = {storage: event.reuse_scope for event in events for storage in event.makes}
    facts = [
        (
            sum(sizes[storage] for storage in event.makes),
            sum(sizes[storage] for storage in event.makes if not readers[storage]),
            [(storage, sizes[storage]) for storage in event.reads if storage in counted and storage not in lasting],
            [
                storage
                for storage in event.inplace_candidates
                if storage in rooms and rooms[storage] == event.reuse_scope
            ],
            event.workspace,
        )
        for event in events
    ]

    # Whether an event can ever free as much as it makes.
    hopeful = [made <= unread + sum(size for _, size in reads) for made, unread, reads, _, _ in facts]

    def during(partial: _Partial, position: int) -> tuple[int, int]:
        """Bytes while an event runs, and after it."""
        made, unread, reads, inplace_candidates, workspace = facts[position]
        left = partial.readers
        freed = 0
        for storage, size in reads:
            if left[storage] == 1:
                freed += size
        written = 0
        for storage in inplace_candidates:
            if left[storage] == 1:
                written = sizes[storage]
                break
        return partial.live + made - written + workspace, partial.live + made - freed - unread

    def run(partial: _Partial, position: int) -> None:
        high, partial.live = during(partial, position)
        partial.peak = max(partial.peak, high)
        partial.order.append(position)
        partial.ready.remove(position)
        for storage in events[position].reads:
            if storage in partial.readers:
                partial.readers[storage] -= 1
        for user in users[position]:
            partial.waiting[user] -= 1
            if not partial.waiting[user]:
                partial.ready.append(user)

    def settle(partial: _Partial) -> None:
        """Run what is free."""
        found = True
        while found:
            found = False
            for position in partial.ready:
                if not hopeful[position]:
                    continue
                high, after = during(partial, position)
                if after <= partial.live and high <= partial.peak:
                    run(partial, position)
                    found = True
                    break

    width = max(1, min(width, _MOST_WORK // max(len(events), 1)))
    start = _Partial(
        peak=live,
        live=live,
        order=[],
        waiting=waiting,
        readers=readers,
        ready=[p for p, count in enumerate(waiting) if not count],
    )
    settle(start)
    beam = [start]
    finished: list[_Partial] = []
    while beam:
        steps: list[tuple[int, int, int, _Partial]] = []
        for partial in beam:
            if not partial.ready:
                finished.append(partial)
                below = min(below, partial.peak)
            for position in partial.ready:
                high, after = during(partial, position)
                steps.append((max(partial.peak, high), after, position, partial))
        # What follows from a step is worked out for the most promising ones alone.
        steps = sorted((step for step in steps if step[0] < below), key=lambda step: step[:3])
        grown: dict[frozenset[int], _Partial] = {}
        for _, _, position, partial in steps[: width * _LOOKED_AT]:
            child = _Partial(
                peak=partial.peak,
                live=partial.live,
                order=list(partial.order),
                waiting=list(partial.waiting),
                readers=dict(partial.readers),
                ready=list(partial.ready),
            )
            run(child, position)
            settle(child)
            if child.peak >= below:
                continue
            key = frozenset(child.order)
            if key not in grown or child.peak < grown[key].peak:
                grown[key] = child
        beam = sorted(grown.values(), key=lambda item: (item.peak, item.live, item.order))[:width]
    return min(finished, key=lambda item: item.peak).order if finished else None
