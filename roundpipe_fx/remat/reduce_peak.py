"""Sequences of the operations of a segment's backward with ever lower peaks, for ever more seconds.

:mod:`roundpipe_fx.remat.order` puts them into an order with a low peak. The next level has a lower one: a storage that
was recomputed and is alive at the peak without being read there is dropped, and recomputed once more before its next
reader (as XLA's rematerialization pass does). The last level may come from :mod:`roundpipe_fx.remat.recompute_per_use`.
::

    level 0    make a · make b · read b (peak, a idle) · read a
    level 1    make a · make b from a · drop a · read b · make a · read a       lower peak, f(a) runs twice
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from roundpipe_fx.analysis.liveness import Event, find_peak
from roundpipe_fx.analysis.operations import OperationGraph, PlannedOp
from roundpipe_fx.remat.block_peak import BlockPeak
from roundpipe_fx.remat.order import order_events
from roundpipe_fx.remat.recompute_per_use import recompute_per_use
from roundpipe_fx.remat.schedule import backward_events

MAX_REMAT_LEVEL = 4
"""How many levels there are beyond the first, and one more where everything is recomputed per use."""
_TRIES = 8
"""Maximum number of storages that are tried for one whose dropping lowers the peak."""
_LONGEST = 12
"""A storage that takes more steps than this to recompute is not dropped."""


class _Copy(NamedTuple):
    """A storage that a step recomputes.

    Attributes:
        step: position of the step.
    """

    number: int
    step: int
    instance: int


class PeakReducer:
    """Arranges the steps of one block. A sequence lists positions of steps; one that runs twice is listed twice."""

    def __init__(
        self, graph: OperationGraph, steps: Sequence[PlannedOp], before: Collection[int], lasting: Collection[int]
    ) -> None:
        self._graph = graph
        self._steps = steps
        self._before = before
        self._lasting = lasting
        used = {storage for step in steps for storage in (*step.reads, *step.makes)}
        self._sizes = {storage: graph.sizes[storage] for storage in used.union(before)}
        self._seen: dict[tuple[int, ...], tuple[list[Event], dict[int, int], dict[int, int]]] = {}
        self._peaks: dict[tuple[int, ...], int] = {}
        self._block_peak = BlockPeak(graph, steps, before, lasting)

    def structure(self) -> Any:
        """Equal for blocks that are alike but for the numbers of their storages."""
        events, sizes, _ = self._events(range(len(self._steps)))
        numbers: dict[int, int] = {}
        local = set(self._before).union(*(event.makes for event in events))

        def number(storage: int) -> int:
            return numbers.setdefault(storage, len(numbers)) if storage in local else -1

        shape = tuple(
            (
                tuple(map(number, event.reads)),
                tuple((number(s), sizes[s], s in self._lasting) for s in event.makes),
                tuple(map(number, event.inplace_candidates)),
                event.workspace,
                step.seconds,
            )
            for event, step in zip(events, self._steps, strict=True)
        )
        return shape, tuple(sorted((number(s), sizes[s], s in self._lasting) for s in self._before))

    def find_sequences(self, most: int) -> list[tuple[list[int], int]]:
        """Sequences with their peaks: the best order of the steps, then one for each level."""
        sequence = self._improve_order(list(range(len(self._steps))))
        sequences = [(sequence, self._peak(sequence))]
        # Several drops may be needed before the peak falls (two tensors of equal size), so a level may take several
        # tries.
        for _ in range(_TRIES):
            next_level = self._drop_at_peak(sequence) if len(sequences) <= most else None
            if next_level is None:
                break
            # The order is not improved each time: planning has to be quick.
            sequence = next_level
            peak = self._peak(sequence)
            if peak < sequences[-1][1]:
                sequences.append((sequence, peak))
        lowest = self._recompute_per_use(sequences[-1][1]) if most else None
        return sequences if lowest is None else [*sequences, (lowest, self._peak(lowest))]

    def _recompute_per_use(self, below: int) -> list[int] | None:
        """Everything recomputed per use, if that has a peak below one that is known."""
        steps = self._steps
        # Only operations of the graph itself are ordered: recomputations move with their readers.
        readers = [position for position, step in enumerate(steps) if step.recipe is None]
        recomputed = {storage for step in steps if step.recipe is not None for storage in step.makes}
        events, sizes, _ = self._events(readers)
        # A storage that is recomputed for a reader is alive only while the reader runs.
        events = [
            replace(
                event,
                workspace=sum(sizes[storage] for storage in steps[position].reads if storage in recomputed),
                reads=[storage for storage in steps[position].reads if storage not in recomputed],
            )
            for event, position in zip(events, readers, strict=True)
        ]
        # `known` is the peak of the order as it is; a better order is taken beside it, not instead of it.
        known = find_peak(events, sizes, self._before, self._lasting).bytes
        order = order_events(events, sizes, self._before, self._lasting, known)
        orders = [readers] if order is None else [readers, [readers[position] for position in order]]
        return recompute_per_use(steps, orders, self._peak, below)

    def given_order(self) -> list[tuple[list[int], int]]:
        """The steps as they are."""
        sequence = list(range(len(self._steps)))
        return [(sequence, self._peak(sequence))]

    def _events(self, sequence: Sequence[int]) -> tuple[list[Event], dict[int, int], dict[int, int]]:
        """Events, bytes by storage and by copy, and storages by copy."""
        known = tuple(sequence)
        if known not in self._seen:
            sizes = dict(self._sizes)
            events, _, copied = backward_events(self._graph, [self._steps[p] for p in sequence], sizes)
            self._seen[known] = events, sizes, copied
        return self._seen[known]

    def _peak(self, sequence: Sequence[int]) -> int:
        known = tuple(sequence)
        if known not in self._peaks:
            self._peaks[known] = self._block_peak(sequence)
        return self._peaks[known]

    def _improve_order(self, sequence: list[int]) -> list[int]:
        """The sequence, or a better order of it."""
        events, sizes, _ = self._events(sequence)
        order = order_events(events, sizes, self._before, self._lasting, self._peak(sequence))
        return sequence if order is None else [sequence[position] for position in order]

    def _drop_at_peak(self, sequence: list[int]) -> list[int] | None:
        """A sequence in which a storage that is alive at the peak is dropped before it and recomputed after it."""
        events, sizes, copied = self._events(sequence)
        peak = find_peak(events, sizes, self._before, self._lasting, list_live=True)
        at = peak.position
        readers: dict[int, list[int]] = {}
        for position, event in enumerate(events):
            for storage in event.reads:
                readers.setdefault(storage, []).append(position)
        copies = self._find_copies(sequence, events)
        best: tuple[int, float, list[int]] | None = None
        # Largest first: `peak.live` is sorted by bytes.
        for instance, _ in peak.live:
            later = [position for position in readers.get(instance, ()) if position > at]
            # Only what was recomputed, is read later, and is not needed where the peak is can be dropped there.
            if instance not in copied or not later or instance in events[at].makes or at in readers[instance]:
                continue
            position = later[0]
            remade = self._recompute_again(copied[instance], position, copies, readers)
            if remade is None:
                continue
            # A peak that stays as it is counts too: several storages may have to go before it falls.
            # The storage dies after its last read before the peak, and is made again right before the next one behind
            # it.
            tried = [*sequence[:position], *remade, *sequence[position:]]
            cost = sum(self._steps[p].seconds for p in remade)
            most = peak.bytes if best is None else best[0]
            result = (self._block_peak(tried, most), cost, tried)
            if result[0] <= most and (best is None or result[:2] < best[:2]):
                best = result
        return None if best is None else best[2]

    def _find_copies(self, sequence: Sequence[int], events: Sequence[Event]) -> dict[int, list[_Copy]]:
        """By storage, its recomputations in order."""
        copies: dict[int, list[_Copy]] = {}
        for number, position in enumerate(sequence):
            step = self._steps[position]
            if step.recipe is not None:
                for storage, instance in zip(step.makes, events[number].makes, strict=True):
                    copies.setdefault(storage, []).append(_Copy(number, position, instance))
        return copies

    def _recompute_again(
        self, storage: int, number: int, copies: Mapping[int, Sequence[_Copy]], readers: Mapping[int, Sequence[int]]
    ) -> list[int] | None:
        """Steps that recompute a storage at a position, from storages alive there; ``None``: it takes too many."""
        sequence: list[int] = []

        def latest(storage: int) -> _Copy | None:
            return next((copy for copy in reversed(copies.get(storage, ())) if copy.number < number), None)

        # Depth first: sources that are dead at that point are recomputed before their reader.
        def make(step: int) -> None:
            for source in self._steps[step].reads:
                made = latest(source)
                if made is not None:
                    alive = readers.get(made.instance, [-1])[-1] >= number
                    # Of its sources, those that are dead by then are recomputed first.
                    if not alive and made.step not in sequence:
                        make(made.step)
            sequence.append(step)

        made = latest(storage)
        assert made is not None
        make(made.step)
        return sequence if len(sequence) <= _LONGEST else None
