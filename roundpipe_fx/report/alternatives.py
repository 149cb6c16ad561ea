"""The other plans on the frontier: memory over the step, what they save and what they recompute.

A plan keeps of them only their peaks and seconds. Their schedules are searched for again when somebody asks. Of a
pipeline they are not: each was emitted and its schedule simulated, so what is shown of them is noted then
(:mod:`roundpipe_fx.planner.alternatives`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.ir.joint_graph import module_path
from roundpipe_fx.ir.source import line_of
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.schedule import levels_of_schedule
from roundpipe_fx.remat.search import Candidate, everything_kept, refine, search
from roundpipe_fx.remat.several_calls import search_for_step
from roundpipe_fx.torch_private import module_path_text

__all__ = ["Alternative", "AlternativeValue", "Alternatives", "Noted", "PlansInTiles", "alternatives_of", "joined"]

_PIECES = 800
"""Number of pieces that the curve of a plan is given in, at most."""


@dataclass(frozen=True, kw_only=True)
class AlternativeValue:
    """A value of the forward that some plan of the frontier saves or recomputes.

    Attributes:
        name: name in the emitted code.
        module: path of the user's module that computes it.
        line: file and line of the user's program; empty if unknown.
        bytes: bytes of its storage.
        seconds: modelled seconds of computing it once.
    """

    name: str
    module: str
    line: str
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A plan of the frontier.

    Attributes:
        bytes: its peak, as the frontier says.
        seconds: modelled seconds of recomputation, likewise; of a plan in tiles, with what its operations take longer.
        curve: bytes allocated at most in each piece of the step: as many operations each, in order. Its maximum can
            differ from ``bytes``, which may count values that are equal once, or several calls.
        forward: number of pieces of the forward.
        saved: indices of the values that it saves.
        recomputed: indices of the values that it recomputes.
        devices: of a pipeline, which has no ``curve``, for each device the bytes allocated at most by an action that
            runs there in each piece of the step: as many seconds each, 0 where it waits.
        makespan: of a pipeline, the modelled seconds of its step.
        tiles: what is carried out in tiles; empty: nothing.
    """

    bytes: int
    seconds: float
    curve: tuple[int, ...]
    forward: int
    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...] = ()
    makespan: float = 0.0
    tiles: str = ""


@dataclass(frozen=True, kw_only=True)
class Alternatives:
    """The plans of the frontier.

    Attributes:
        values: what they differ in.
        plans: highest peak first; points of the frontier that the search does not reach again are missing. A pipeline
            that was chosen and is not on the frontier is the last.
        chosen: index of the plan that was chosen; ``None`` if it is none of them.
    """

    values: tuple[AlternativeValue, ...] = ()
    plans: tuple[Alternative, ...] = ()
    chosen: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlansInTiles:
    """What plans in tiles reach.

    Attributes:
        plans: in tiles, and those without; some may be dominated.
        seconds: modelled seconds of a step without tiles and recomputation.
        anywhere: whether a plan in tiles is taken wherever it takes fewer seconds; else only below the lowest peak
            that is reached without.
    """

    plans: Alternatives
    seconds: float
    anywhere: bool


class Noted:
    """Plans of one graph or several as plain data; values of the same name are the same."""

    def __init__(self) -> None:
        self._plans: list[Alternative] = []
        self._values: dict[str, AlternativeValue] = {}
        self._numbers: dict[str, int] = {}

    def note(self, graph: OperationGraph, candidate: Candidate, point: tuple[int, float], tiles: str = "") -> None:
        """Add a plan.

        Args:
            graph: what it was made from.
            candidate: the plan.
            point: its peak in bytes and its seconds, as they are told.
            tiles: what is carried out in tiles.
        """
        schedule = candidate.schedule
        levels = np.array(levels_of_schedule(graph, schedule), dtype=np.int64)
        forward = _pieces(levels[: len(graph.forward)], len(levels))
        backward = _pieces(levels[len(graph.forward) :], len(levels))
        steps = [step for _, block in schedule.backward for step in block if step.recipe is not None]
        recomputed = dict.fromkeys(storage for step in steps for storage in step.makes)
        plan = Alternative(
            bytes=point[0],
            seconds=point[1],
            curve=(*forward, *backward),
            forward=len(forward),
            saved=self._indices(graph, sorted(schedule.choice.kept)),
            recomputed=self._indices(graph, recomputed),
            tiles=tiles,
        )
        self._plans.append(plan)

    def alternatives(self, chosen: int | None = None) -> Alternatives:
        """All of them, in order.

        Args:
            chosen: index of the plan that was chosen, if it is one of them.
        """
        return Alternatives(values=tuple(self._values.values()), plans=tuple(self._plans), chosen=chosen)

    def _indices(self, graph: OperationGraph, storages: Iterable[int]) -> tuple[int, ...]:
        nodes = {
            graph.values[number].name: number for number in storages if graph.sizes[number] and number in graph.values
        }
        for name, storage in nodes.items():
            if name not in self._values:
                self._values[name] = _value(graph, storage)
        return tuple(self._numbers.setdefault(name, len(self._numbers)) for name in nodes)


def joined(parts: Sequence[Alternatives], is_told: Callable[[Alternative], bool]) -> Alternatives:
    """Some plans of several frontiers as those of one, highest peak first.

    Args:
        parts: frontiers; values of the same name are the same. The plan that was chosen is of the first.
        is_told: says of a plan whether it is one of them; the one that was chosen always is.
    """
    values: dict[str, AlternativeValue] = {}
    numbers: dict[str, int] = {}
    plans: list[tuple[Alternative, bool]] = []
    known: set[tuple[int, float]] = set()

    def renumbered(part: Alternatives, indices: Iterable[int]) -> tuple[int, ...]:
        values_of_part = [part.values[index] for index in indices]
        for value in values_of_part:
            values.setdefault(value.name, value)
        return tuple(numbers.setdefault(value.name, len(numbers)) for value in values_of_part)

    for place, part in enumerate(parts):
        for index, plan in enumerate(part.plans):
            is_own, point = not place and index == part.chosen, (plan.bytes, plan.seconds)
            if is_own or (is_told(plan) and point not in known):
                known.add(point)
                saved, recomputed = renumbered(part, plan.saved), renumbered(part, plan.recomputed)
                plans.append((dataclasses.replace(plan, saved=saved, recomputed=recomputed), is_own))
    plans.sort(key=lambda item: (-item[0].bytes, item[0].seconds))
    chosen = next((index for index, (_, is_own) in enumerate(plans) if is_own), None)
    return Alternatives(values=tuple(values.values()), plans=tuple(plan for plan, _ in plans), chosen=chosen)


def alternatives_of(
    graph: OperationGraph, points: Sequence[tuple[int, float]], limit: int, own_bytes: int, own_seconds: float
) -> Alternatives:
    """The plans of a frontier.

    Args:
        graph: what they were made from.
        points: the frontier: (peak bytes, modelled seconds of recomputation).
        limit: bytes that were searched for.
        own_bytes: predicted peak of the plan that was chosen.
        own_seconds: its modelled seconds of recomputation.
    """
    candidates = _candidates(graph, points[0], limit)
    noted = Noted()
    chosen: tuple[int, int] | None = None
    count = 0
    for size, seconds in points:
        candidate = candidates.get((size, seconds))
        if candidate is None:
            continue
        alike = math.isclose(seconds, own_seconds, rel_tol=1e-6, abs_tol=1e-12)
        if alike and (chosen is None or abs(size - own_bytes) < abs(chosen[1] - own_bytes)):
            chosen = count, size
        noted.note(graph, candidate, (size, seconds))
        count += 1
    return noted.alternatives(chosen[0] if chosen is not None else None)


def _candidates(graph: OperationGraph, highest: tuple[int, float], limit: int) -> dict[tuple[int, float], Candidate]:
    """By peak and seconds, the candidates that a planner with a limit looks at."""
    blocks = Blocks(graph)
    if graph.step is not None:
        result = search_for_step(blocks)
    else:
        kept = everything_kept(blocks)
        # The planner's may count equal values once, and the search is scaled by its peak.
        if highest[1] == 0:
            kept = Candidate(kept.schedule, dataclasses.replace(kept.peak, bytes=highest[0]))
        result = search(blocks, kept=kept)
    return {(item.peak.bytes, item.seconds): item for item in refine(blocks, result, limit)}


def _pieces(levels: np.ndarray, total: int) -> tuple[int, ...]:
    """The largest level of each of so many pieces as are this part's share of the whole."""
    count = min(len(levels), math.ceil(_PIECES * len(levels) / max(total, _PIECES)))
    return tuple(int(piece.max()) for piece in np.array_split(levels, count)) if count else ()


def _value(graph: OperationGraph, storage: int) -> AlternativeValue:
    node = graph.values[storage]
    return AlternativeValue(
        name=node.name,
        module=module_path(node, module_path_text),
        line=line_of(node),
        bytes=graph.sizes[storage],
        seconds=graph.recipes[storage].seconds if storage in graph.recipes else 0.0,
    )
