"""The other plans on the frontier as data: memory over the step, what they save and what they recompute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


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
    """Alternative plans of which some are in tiles.

    Attributes:
        plans: in tiles, and those without; some may be dominated.
        seconds: modelled seconds of a step without tiles and recomputation.
        anywhere: whether a plan in tiles is taken wherever it takes fewer seconds; else only below the lowest peak
            that is reached without.
    """

    plans: Alternatives
    seconds: float
    anywhere: bool


def merge_frontiers(parts: Sequence[Alternatives], is_shown: Callable[[Alternative], bool]) -> Alternatives:
    """Some plans of several frontiers as those of one, highest peak first.

    Args:
        parts: frontiers; values of the same name are the same. The plan that was chosen is of the first.
        is_shown: says of a plan whether it is one of them; the one that was chosen always is.
    """
    values: dict[str, AlternativeValue] = {}
    numbers: dict[str, int] = {}
    plans: list[tuple[Alternative, bool]] = []
    points: set[tuple[int, float]] = set()

    def renumber(part: Alternatives, indices: Iterable[int]) -> tuple[int, ...]:
        values_of_part = [part.values[index] for index in indices]
        for value in values_of_part:
            values.setdefault(value.name, value)
        return tuple(numbers.setdefault(value.name, len(numbers)) for value in values_of_part)

    for position, part in enumerate(parts):
        for index, plan in enumerate(part.plans):
            is_own, point = not position and index == part.chosen, (plan.bytes, plan.seconds)
            if is_own or (is_shown(plan) and point not in points):
                points.add(point)
                saved, recomputed = renumber(part, plan.saved), renumber(part, plan.recomputed)
                plans.append((dataclasses.replace(plan, saved=saved, recomputed=recomputed), is_own))
    plans.sort(key=lambda item: (-item[0].bytes, item[0].seconds))
    chosen = next((index for index, (_, is_own) in enumerate(plans) if is_own), None)
    return Alternatives(values=tuple(values.values()), plans=tuple(plan for plan, _ in plans), chosen=chosen)
