"""Liveness: how many bytes live at one time while events make and read storages.

A storage lives from the event that makes it until the last event that reads it, or to the end if somebody holds it.
The peak is taken before anything of an event's reads dies: results and operands live side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Event", "LivePeak", "peak_of"]


@dataclass(slots=True)
class Event:
    """Something that runs.

    Attributes:
        what: for whoever reads the peak.
        reads: storages.
        makes: storages.
        over: storages whose place its result takes, the first that dies here and was made in the same room.
        room: where it runs.
        scratch: bytes that it needs beside its results and that are free again when it ends.
    """

    what: Any
    reads: list[int]
    makes: list[int]
    over: tuple[int, ...] = ()
    room: Any = None
    scratch: int = 0


@dataclass(frozen=True)
class LivePeak:
    """The most bytes that live at one time.

    Attributes:
        bytes: how many.
        position: of the event that runs then; -1: before the first.
        live: storages alive then with their bytes, largest first.
    """

    bytes: int
    position: int
    live: tuple[tuple[int, int], ...]


def peak_of(
    events: Sequence[Event],
    sizes: Sequence[int],
    before: Collection[int] = (),
    lasting: Collection[int] = (),
    arriving: Mapping[int, Collection[int]] | None = None,
) -> LivePeak:
    """The peak of a sequence of events.

    Args:
        events: what runs, in order.
        sizes: bytes by storage.
        before: storages that live when the first event runs.
        lasting: storages that live to the end.
        arriving: storages that somebody else makes, by position of the event before which he does.
    """
    arriving = arriving or {}
    born = dict.fromkeys(before, -1)
    last = dict.fromkeys(before, -1)
    for position, arrived in arriving.items():
        born.update(dict.fromkeys(arrived, position))
        last.update(dict.fromkeys(arrived, position))
    for position, event in enumerate(events):
        for storage in event.makes:
            born[storage] = last[storage] = position
        for storage in event.reads:
            if storage in born:
                last[storage] = position
    for storage in lasting:
        if storage in born:
            last[storage] = len(events)
    dying: dict[int, list[int]] = {}
    for storage, position in last.items():
        dying.setdefault(position, []).append(storage)
    room: dict[int, Any] = {}
    live = sum(sizes[storage] for storage in before if last[storage] >= 0)
    peak, at = live, -1
    for position, event in enumerate(events):
        for storage in arriving.get(position, ()):
            live += sizes[storage]
        for storage in event.makes:
            live += sizes[storage]
            room[storage] = event.room
        written = -1
        for storage in event.over:
            if storage in room and last[storage] == position and room[storage] == event.room:
                written = storage
                live -= sizes[storage]
                break
        if live + event.scratch > peak:
            peak, at = live + event.scratch, position
        for storage in dying.get(position, ()):
            if storage != written:
                live -= sizes[storage]
    alive = [(storage, sizes[storage]) for storage, birth in born.items() if birth <= at <= last[storage]]
    return LivePeak(peak, at, tuple(sorted(alive, key=lambda item: -item[1])))
