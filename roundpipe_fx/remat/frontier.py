"""Frontier of a segment: what it can save, for how many seconds of recomputation, exactly.

For a price of λ bytes a second, choosing which forward storages of a segment to save and which to recompute is a
minimum cut. Two binary variables: "storage v is needed in the backward", "operation o is recomputed". A storage that is
needed and not recomputed pays bytes(v); recomputing o pays λ·seconds(o) and needs every storage that o reads; storages
that the backward reads are needed. All terms are submodular, so one maximum flow gives the optimum, and the breakpoints
in λ are the vertices of the lower convex hull of (saved bytes, recompute seconds). They are found by intersecting
neighbouring lines (Eisner and Severance, "Mathematical techniques for efficient record segmentation in large shared
databases", 1976). ::

    seconds │●                     save nothing
            │ ╲
            │  ●                   price λ between the slopes of the two lines: this vertex is optimal
            │    ╲______●          save everything that the backward reads
            └──────────────── saved bytes
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from roundpipe_fx.analysis.minimum_cut import CAPACITY, SINK, SOURCE, UNCUTTABLE, Arc, minimum_cut
from roundpipe_fx.analysis.operations import OperationGraph, RecomputeRecipe


@dataclass(frozen=True)
class Saving:
    """A vertex of a segment's frontier.

    Attributes:
        saved: storages kept from forward to backward.
        seconds: modelled seconds of recomputing the others.
    """

    saved: frozenset[int]
    bytes: int
    seconds: float


Known = dict[Any, list[tuple[frozenset[int], float]]]
"""Frontiers by structure, so that segments that are alike are solved once."""


def frontier(
    graph: OperationGraph, needed: Sequence[int], available: Collection[int], known: Known, most: int = 8
) -> list[Saving]:
    """The lower convex hull of (saved bytes, recompute seconds), from nothing recomputed to nothing saved.

    Args:
        needed: forward storages that a backward reads.
        available: forward storages that are available anyway, at no cost.
        known: what was solved before; extended.
        most: maximum number of vertices.
    """
    cut = _Cut(graph, needed, available)
    structure = cut.structure()
    if structure not in known:
        position = {storage: index for index, storage in enumerate(cut.storages)}
        known[structure] = [
            (frozenset(position[storage] for storage in saving.saved), saving.seconds)
            for saving in _vertices(cut, most)
        ]
    storages = list(cut.storages)
    savings = []
    for positions, seconds in known[structure]:
        saved = frozenset(storages[index] for index in positions)
        savings.append(Saving(saved, sum(graph.sizes[storage] for storage in saved), seconds))
    return savings


def _vertices(cut: _Cut, most: int) -> list[Saving]:
    if not cut.storages:
        return [Saving(frozenset(), 0, 0.0)]
    lowest, highest = cut.solve(0.0), cut.solve(None)
    # lowest: bytes alone count, so nothing is saved that can be recomputed; highest: seconds alone.
    savings = [highest, lowest] if lowest.bytes < highest.bytes else [highest]
    pending = [(highest, lowest)] if len(savings) == 2 else []
    while pending and len(savings) < most:
        more, less = pending.pop(0)
        if less.seconds <= more.seconds or less.bytes >= more.bytes:
            continue
        # At this price both cost the same. If nothing costs less, the hull has no vertex between them.
        price = (more.bytes - less.bytes) / (less.seconds - more.seconds)
        middle = cut.solve(price)
        line = more.bytes + price * more.seconds
        if middle.bytes + price * middle.seconds < line * (1 - 1e-6) and less.bytes < middle.bytes < more.bytes:
            savings.append(middle)
            pending += [(more, middle), (middle, less)]
    return sorted(savings, key=lambda saving: -saving.bytes)


class _Cut:
    """The network of one segment: needed storages and recomputed operations are on the source's side."""

    def __init__(self, graph: OperationGraph, needed: Sequence[int], available: Collection[int]) -> None:
        self._graph = graph
        self.storages: dict[int, int] = {}
        self._runs: dict[RecomputeRecipe, int] = {}
        # Only what the backward reaches through recomputation is part of the network; saved storages of earlier
        # segments end the search.
        pending = [storage for storage in needed if storage not in available and graph.is_forward(storage)]
        self._needed = set(pending)
        while pending:
            storage = pending.pop()
            if storage in self.storages:
                continue
            self.storages[storage] = 2 + len(self.storages) + len(self._runs)
            recipe = self._recipe(storage)
            if recipe not in self._runs:
                self._runs[recipe] = 2 + len(self.storages) + len(self._runs)
                pending += [source for source in recipe.reads if source not in available and graph.is_forward(source)]

    def structure(self) -> Any:
        """Equal for networks that are alike."""
        storages = tuple(
            (vertex, self._graph.sizes[s], s in self._needed, s in self._graph.must_recompute)
            for s, vertex in self.storages.items()
        )
        runs = tuple(
            (vertex, recipe.seconds, tuple(self.storages.get(source, 0) for source in recipe.reads))
            for recipe, vertex in self._runs.items()
        )
        return storages, runs, tuple(self._runs[self._recipe(storage)] for storage in self.storages)

    def _recipe(self, storage: int) -> RecomputeRecipe:
        # All results of one operation have the same recipe, so they are one vertex.
        return self._graph.mask_only.get(storage) or self._graph.recipes[storage]

    def solve(self, price: float | None) -> Saving:
        """The optimum at ``price`` bytes a second; ``None``: seconds alone count."""
        sizes = {storage: self._graph.sizes[storage] for storage in self.storages}
        if price is None:
            # So many bytes a second that saving everything is cheaper than recomputing the quickest operation.
            quickest = min((recipe.seconds for recipe in self._runs if recipe.seconds > 0), default=1.0)
            price = 2 * sum(sizes.values()) / quickest
        # Capacities are whole numbers: scaled up, what is rounded off does not matter.
        scale = CAPACITY / max(sum(sizes.values()), 1)
        arcs: list[Arc] = []

        def arc(source: int, target: int, capacity: float) -> None:
            arcs.append((source, target, min(int(capacity), UNCUTTABLE)))

        # Source side of the cut = needed and recomputed. Arcs: SOURCE → storage (the backward reads it: uncuttable),
        # storage → run (cut: the storage is saved, bytes), run → storage (recomputing needs it: uncuttable), run → SINK
        # (cut: recomputed, λ·seconds).
        for storage, vertex in self.storages.items():
            if storage in self._needed:
                arc(SOURCE, vertex, UNCUTTABLE)
            barred = storage in self._graph.must_recompute
            arc(vertex, self._runs[self._recipe(storage)], UNCUTTABLE if barred else max(sizes[storage] * scale, 1))
        for recipe, vertex in self._runs.items():
            # Among equal optima the one that recomputes less is preferred, so nothing is entirely free.
            arc(vertex, SINK, price * recipe.seconds * scale + (1 if price else 0))
            for storage in recipe.reads:
                if storage in self.storages:
                    arc(vertex, self.storages[storage], UNCUTTABLE)
        _, reached = minimum_cut(arcs, 2 + len(self.storages) + len(self._runs))
        # What the cut separates: a run on the source's side is recomputed; a needed storage whose run is on the sink's
        # side is saved.
        rerun = {recipe for recipe, vertex in self._runs.items() if vertex in reached}
        saved = frozenset(
            s for s, vertex in self.storages.items() if vertex in reached and self._recipe(s) not in rerun
        )
        return Saving(saved, sum(sizes[s] for s in saved), sum(recipe.seconds for recipe in rerun))
