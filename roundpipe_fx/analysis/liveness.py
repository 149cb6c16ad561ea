"""Liveness: bytes that are alive while events allocate and read storages.

A storage lives from the event that allocates it until its last reader, or to the end if the caller holds it. During an
event its operands and its results are alive::

    event                  a   b   c   workspace     while it runs                     when it is over
    a = f()                4                         4                                 4
    b = relu(a)            4   4                     8; 4 if b is written over a       4: a was read for the last time
    c = g(b)                   4   1   2             7                                 1: c lasts
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roundpipe_fx.analysis.caching_allocator import CachingAllocator

_WORKSPACE = -2
"""Stands for the workspace of an event, for an allocator."""


@dataclass(slots=True)
class Event:
    """An operation that runs.

    Attributes:
        description: describes it to the reader of a peak.
        reads: storages that it reads.
        makes: storages that it allocates.
        inplace_candidates: storages that its result may overwrite: the first one that dies here and was made in the
            same reuse scope.
        reuse_scope: where it runs; a result overwrites only storages allocated in the same scope.
        workspace: bytes that it allocates beside its results and frees before it ends.
        stream: number of the stream that it runs on.
    """

    description: Any
    reads: Sequence[int]
    makes: Sequence[int]
    inplace_candidates: tuple[int, ...] = ()
    reuse_scope: Any = None
    workspace: int = field(default=0, kw_only=True)
    stream: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class LivePeak:
    """The peak of a sequence of events.

    Attributes:
        bytes: bytes alive at the peak.
        position: position of the event that runs then; -1: before the first.
        live: storages alive then with their bytes, largest first; empty unless requested.
    """

    bytes: int
    position: int
    live: tuple[tuple[int, int], ...]


def find_peak(
    events: Sequence[Event],
    sizes: Sequence[int] | Mapping[int, int],
    before: Collection[int] = (),
    lasting: Collection[int] = (),
    arriving: Mapping[int, Collection[int]] | None = None,
    list_live: bool = False,
    allocator: CachingAllocator | None = None,
) -> LivePeak:
    """Find the peak of a sequence of events.

    Args:
        sizes: bytes of each storage, indexed by its number.
        before: storages that are alive when the first event runs.
        lasting: storages that live to the end.
        arriving: storages that are allocated by others, by position of the event that follows.
        list_live: whether to list the storages alive at the peak.
        allocator: determines the bytes that count for a size, and keeps its state: storages in ``lasting`` stay
            allocated. ``None``: the size itself. Not together with ``before``.

    Returns:
        the peak.
    """
    arriving = arriving or {}
    last = _last_uses(events, before, lasting, arriving)
    peak, at = sum(sizes[storage] for storage in before if last[storage] >= 0), -1
    # The peak is during an event: operands, results and workspace are alive together.
    for position, (during, _) in enumerate(_levels(events, sizes, before, arriving, last, allocator)):
        if during > peak:
            peak, at = during, position
    return LivePeak(peak, at, _alive(events, sizes, before, arriving, last, at) if list_live else ())


def levels_of(
    events: Sequence[Event],
    sizes: Sequence[int] | Mapping[int, int],
    lasting: Collection[int] = (),
    arriving: Mapping[int, Collection[int]] | None = None,
    allocator: CachingAllocator | None = None,
) -> list[tuple[int, int]]:
    """For each event, the bytes alive while it runs, and when it is over. Arguments as for :func:`find_peak`.

    The largest of the former is the peak.
    """
    arriving = arriving or {}
    return list(_levels(events, sizes, (), arriving, _last_uses(events, (), lasting, arriving), allocator))


def find_lifetimes(
    events: Sequence[Event],
    lasting: Collection[int] = (),
    arriving: Mapping[int, Collection[int]] | None = None,
) -> dict[int, tuple[int, int]]:
    """By storage, the positions of the first and the last event during which it is alive, in order of allocation.

    Arguments as for :func:`find_peak`. Storages that a result overwrites are alive during that event, too.
    """
    arriving = arriving or {}
    born: dict[int, int] = {}
    for position, event in enumerate(events):
        for storage in (*arriving.get(position, ()), *event.makes):
            born.setdefault(storage, position)
    last = _last_uses(events, (), lasting, arriving)
    return {storage: (first, min(last[storage], len(events) - 1)) for storage, first in born.items()}


def _last_uses(
    events: Sequence[Event],
    before: Collection[int],
    lasting: Collection[int],
    arriving: Mapping[int, Collection[int]],
) -> dict[int, int]:
    """By storage, the position where it dies: the number of events if it lives to the end.

    -1 for one that is alive before and never read. Others that are never read die where they are allocated.
    """
    last = dict.fromkeys(before, -1)
    for position, arrived in arriving.items():
        last.update(dict.fromkeys(arrived, position))
    # Later reads overwrite earlier ones, so what is left is the last use.
    for position, event in enumerate(events):
        for storage in event.makes:
            last[storage] = position
        for storage in event.reads:
            if storage in last:
                last[storage] = position
    for storage in lasting:
        if storage in last:
            last[storage] = len(events)
    return last


def _levels(
    events: Sequence[Event],
    sizes: Sequence[int] | Mapping[int, int],
    before: Collection[int],
    arriving: Mapping[int, Collection[int]],
    last: Mapping[int, int],
    allocator: CachingAllocator | None = None,
) -> Iterator[tuple[int, int]]:
    """For each event, the bytes alive while it runs, and when it is over."""
    # By position. Lasting storages are at ``len(events)``; index -1, the last entry, holds those never read.
    dying: list[list[int]] = [[] for _ in range(len(events) + 2)]
    for storage, position in last.items():
        dying[position].append(storage)
    counted: Any = sizes if allocator is None else {}
    reuse_scope: dict[int, Any] = {}
    live = sum(sizes[storage] for storage in before if last[storage] >= 0)
    # Order within an event: what arrives, what it makes, what it writes over, its workspace, then deaths.
    for position, event in enumerate(events):
        if position in arriving:
            if allocator is not None:
                counted.update((storage, allocator.allocate(storage, sizes[storage])) for storage in arriving[position])
            live += sum(counted[storage] for storage in arriving[position])
        for storage in event.makes:
            if allocator is not None:
                counted[storage] = allocator.allocate(storage, sizes[storage], event.stream)
            live += counted[storage]
            reuse_scope[storage] = event.reuse_scope
        written = None
        for storage in event.inplace_candidates:
            # The result was counted above, and takes over this memory: of the two only one counts.
            if last.get(storage) == position and storage in reuse_scope and reuse_scope[storage] == event.reuse_scope:
                written = storage
                live -= counted[storage]
                break
        workspace = event.workspace
        # The allocator gives a block for the workspace and gets it back: the block's size counts, not the request's.
        if allocator is not None:
            workspace = allocator.allocate(_WORKSPACE, workspace, event.stream)
            allocator.free(_WORKSPACE)
        during = live + workspace
        # Deaths come last: an operand is alive until its last reader is over.
        for storage in dying[position]:
            if storage != written:
                live -= counted[storage]
                if allocator is not None:
                    allocator.free(storage)
        yield during, live


def _alive(
    events: Sequence[Event],
    sizes: Sequence[int] | Mapping[int, int],
    before: Collection[int],
    arriving: Mapping[int, Collection[int]],
    last: Mapping[int, int],
    at: int,
) -> tuple[tuple[int, int], ...]:
    born = dict.fromkeys(before, -1)
    for position, event in enumerate(events[: at + 1]):
        born.update(dict.fromkeys(arriving.get(position, ()), position))
        born.update(dict.fromkeys(event.makes, position))
    written = _overwritten(events, last, at) if at >= 0 else None
    alive = [(storage, sizes[storage]) for storage in born if last[storage] >= at and storage != written]
    return tuple(sorted(alive, key=lambda item: -item[1]))


def _overwritten(events: Sequence[Event], last: Mapping[int, int], at: int) -> int | None:
    """The storage that the result of an event overwrites, which holds no bytes of its own any more."""
    reuse_scope = {storage: event.reuse_scope for event in events[: at + 1] for storage in event.makes}
    dying = (storage for storage in events[at].inplace_candidates if last.get(storage) == at)
    return next((s for s in dying if s in reuse_scope and reuse_scope[s] == events[at].reuse_scope), None)
