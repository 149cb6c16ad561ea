"""In which order the operations of a segment's backward run, so that few bytes live at one time.

Ordering a graph of operations for least peak is NP-hard (Sethi, "Complete register allocation problems", 1975), so
this is a beam search: partial orders grow step by step, and of those of equal length the few with the lowest peaks are
extended::

    beam                      next operations, cheapest first      of each, all that is free then
    [a b]     peak 5  ──▶     c: 5   d: 7                    ──▶   [a b c e]  [a b d]
    [a c]     peak 6  ──▶     b: 6   e: 9 (the known peak)   ──▶   [a c b e]       the best few are the next beam

An operation that allocates no more than it frees, without a new peak, is free: it is run at once, since waiting gains
nothing. Partial orders that reach the peak of the known order are dropped: it stands unless a better one is found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roundpipe_fx.analysis.liveness import Event

_WIDTH = 3
_LOOKED_AT = 2
"""Expand at most this many candidates per partial order."""
_MOST_WORK = 300
"""Events times partial orders: long blocks are ordered with fewer at a time."""


class _Fact(NamedTuple):
    """The effect of an event on memory, in bytes.

    Attributes:
        makes: bytes that it allocates.
        unread: those of them that are never read.
        reads: storages that it reads and that can die, with their bytes.
        written: storages that its result may be written over.
        workspace: bytes while it runs.
    """

    makes: int
    unread: int
    reads: list[tuple[int, int]]
    written: list[int]
    workspace: int


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


class _Block:
    """The events to be ordered, and the effect of running one of them next.

    Args:
        events: in an order that is possible.
        before: storages that live at the beginning.
        lasting: storages that live to the end.
    """

    def __init__(
        self, events: Sequence[Event], sizes: Mapping[int, int], before: Collection[int], lasting: Collection[int]
    ) -> None:
        self._events, self._sizes = events, sizes
        maker = {storage: position for position, event in enumerate(events) for storage in event.makes}
        counted = {*maker, *before}
        self._users: list[list[int]] = [[] for _ in events]
        self._waiting: list[int] = []
        # A storage that lasts has one reader more than really exists, so it never dies.
        self._readers: dict[int, int] = {storage: 1 if storage in lasting else 0 for storage in counted}
        for position, event in enumerate(events):
            sources = {maker[storage] for storage in event.reads if storage in maker}
            self._waiting.append(len(sources))
            for source in sources:
                self._users[source].append(position)
            for storage in event.reads:
                if storage in counted:
                    self._readers[storage] += 1
        self._live = sum(sizes[storage] for storage in before if self._readers[storage])
        scopes = {storage: event.reuse_scope for event in events for storage in event.makes}
        self._facts = [
            _Fact(
                makes=sum(sizes[storage] for storage in event.makes),
                unread=sum(sizes[storage] for storage in event.makes if not self._readers[storage]),
                reads=[(s, sizes[s]) for s in event.reads if s in counted and s not in lasting],
                written=[s for s in event.inplace_candidates if s in scopes and scopes[s] == event.reuse_scope],
                # In-place operations have to run in the same module: emitted modules do not write over each other's
                # inputs.
                workspace=event.workspace,
            )
            for event in events
        ]
        # What allocates more than everything that it reads is never free, so it need not be tried after each event.
        self._can_be_free = [fact.makes <= fact.unread + sum(size for _, size in fact.reads) for fact in self._facts]

    def start(self) -> _Partial:
        """The partial order of the events that are free at the beginning."""
        partial = _Partial(
            peak=self._live,
            live=self._live,
            order=[],
            waiting=list(self._waiting),
            readers=dict(self._readers),
            ready=[position for position, count in enumerate(self._waiting) if not count],
        )
        self._run_free_events(partial)
        return partial

    def bytes_during(self, partial: _Partial, position: int) -> tuple[int, int]:
        """Bytes while an event runs next, and after it."""
        allocated, unread, reads, candidates, workspace = self._facts[position]
        left = partial.readers
        freed = 0
        for storage, size in reads:
            # The last reader frees a storage. `left` counts readers that have not run, this one included.
            if left[storage] == 1:
                freed += size
        # A result is written over one operand at most: the first that dies here.
        written = 0
        for storage in candidates:
            if left[storage] == 1:
                written = self._sizes[storage]
                break
        return partial.live + allocated - written + workspace, partial.live + allocated - freed - unread

    def append_event(self, partial: _Partial, position: int, high: int, after: int) -> _Partial:
        """The partial order extended by an event and by the events that are free then; bytes as from :meth:`during`."""
        child = _Partial(
            peak=partial.peak,
            live=partial.live,
            order=list(partial.order),
            waiting=list(partial.waiting),
            readers=dict(partial.readers),
            ready=list(partial.ready),
        )
        self._run(child, position, high, after)
        self._run_free_events(child)
        return child

    def _run(self, partial: _Partial, position: int, high: int, after: int) -> None:
        partial.live = after
        partial.peak = max(partial.peak, high)
        partial.order.append(position)
        partial.ready.remove(position)
        readers, waiting = partial.readers, partial.waiting
        for storage in self._events[position].reads:
            if storage in readers:
                readers[storage] -= 1
        for user in self._users[position]:
            waiting[user] -= 1
            if not waiting[user]:
                partial.ready.append(user)

    def _run_free_events(self, partial: _Partial) -> None:
        ran = True
        while ran:
            ran = False
            # `ready` changes when something runs, so the scan starts over each time.
            for position in partial.ready:
                if not self._can_be_free[position]:
                    continue
                high, after = self.bytes_during(partial, position)
                # Free: no more bytes afterwards, and no new peak. Running it now can only help what follows.
                if after <= partial.live and high <= partial.peak:
                    # ``ready`` has changed, and what was not free before may be now.
                    self._run(partial, position, high, after)
                    ran = True
                    break


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
        before: storages that live at the beginning and die when they are read for the last time.
        lasting: storages that live to the end.
        below: bytes: a peak that is known; partial orders that reach it are dropped.
        width: number of partial orders that are extended.

    Returns:
        the positions of the events in the order found; ``None``: none was found.
    """
    block = _Block(events, sizes, before, lasting)
    # Work is bounded by events × orders. A block of 300 events has a beam of one, that is, a greedy search.
    width = max(1, min(width, _MOST_WORK // max(len(events), 1)))
    beam = [block.start()]
    best: _Partial | None = None
    while beam:
        steps: list[tuple[int, int, int, _Partial]] = []
        for partial in beam:
            # Nothing is ready: the order is complete. Later ones have to beat it.
            if not partial.ready and (best is None or partial.peak < best.peak):
                best = partial
                below = min(below, partial.peak)
            for position in partial.ready:
                high, after = block.bytes_during(partial, position)
                steps.append((max(partial.peak, high), after, position, partial))
        # Only the most promising candidates are expanded.
        steps = sorted((step for step in steps if step[0] < below), key=lambda step: step[:3])
        grown: dict[frozenset[int], _Partial] = {}
        for peak, after, position, partial in steps[: width * _LOOKED_AT]:
            child = block.append_event(partial, position, peak, after)
            # Orders of the same events go on in the same ways, so only the one with the lower peak is kept.
            key = frozenset(child.order)
            if child.peak < below and (key not in grown or child.peak < grown[key].peak):
                grown[key] = child
        beam = sorted(grown.values(), key=lambda item: (item.peak, item.live, item.order))[:width]
    return None if best is None else best.order
