"""What is tiled: regions at whose work the peak is, one kind after another, until the budget is met.

Plans are made without tiles first. If the budget cannot be met, the regions that hold most at the lowest peak that was
found are tiled, all of the same kind alike, and the graph is replanned; then the next kind, or the same in more tiles.
While one operation alone needs more than the budget, no plan is searched for: what it needs says what is tiled next.

Where tiles are taken wherever they pay, what is saved and what is tiled is decided together then, segment by segment
(:mod:`roundpipe_fx.compiler.segments_in_tiles`), and plans with the best of these tiles are made.

What is tried so depends on the budget. The least budget that an error names has therefore been planned for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from roundpipe_fx.analysis.tiling import TileRegion, TileRegions
from roundpipe_fx.compiler.class_tiles import instead_of_rows, operations_of
from roundpipe_fx.compiler.kinds_of_regions import (
    Kind,
    Kinds,
    MetError,
    Needs,
    Tiles,
    TilingSteps,
    UnmetError,
    by_kind,
    first_tiles,
    names_of,
)
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.remat.choose import Chosen, refusal
from roundpipe_fx.torch_private import input_sizes

__all__ = ["Needs", "TilingSteps", "UnmetError", "plan_with_tiles", "tile_down", "tile_sequence"]

_MORE = (2, 4, 8)
"""Where it is not known what binds, so many times as many tiles as first are tried."""
_WORTH = 0.02
"""Other tiles are tried where a step takes so much longer than with everything saved: a trial takes a plan's time."""
_TRIED = 4
"""So many of the tiles that the chain of segments finds best are tried: what it counts is not quite what plans need."""
_ROUGHLY = 1.01
"""Tiles are tried if the chain counts at most so many times the seconds of the shortest plan so far."""
_GAIN = 0.999
"""More tiles are worth it if they lower the peak to this share at most."""

_InTiles: TypeAlias = tuple[Mapping[Kind, int], Lowered]
"""Kinds with their number of tiles, and the plan with these."""


def plan_with_tiles(joint: JointGraph, tiling: str | None, budget: int | float, steps: TilingSteps) -> Lowered:
    """Plan for a budget, with tiles as the option says.

    Args:
        joint: an annotated graph.
        tiling: the option.
        budget: bytes or a share.
        steps: how graphs are made and planned.

    Raises:
        InfeasibleBudgetError: the budget is below what the step needs at the least.
    """
    kinds = Kinds(joint, steps)
    try:
        return _planned(tiling, budget, steps, kinds)
    except UnmetError as error:
        unmet = error
    assert unmet.chosen is not None
    asked = unmet.chosen.limit
    kinds.is_met_by_known = True
    while True:
        # For another budget, other tiles are tried.
        try:
            _planned(tiling, math.ceil(unmet.needs.bytes / steps.share), steps, kinds)
            break
        except MetError:
            break
        except UnmetError as error:
            unmet = error
    assert unmet.chosen is not None
    refused = refusal(dataclasses.replace(unmet.chosen, limit=asked), unmet.needs.bytes, budget)
    refused.wants_sizes = tiling != "never" and bool(input_sizes(joint.module))
    raise refused


def tile_down(joint: JointGraph, steps: TilingSteps) -> None:
    """Have plans made in more and more tiles, as long as they lower the peak.

    Args:
        joint: an annotated graph; not changed.
        steps: how graphs are made; ``planned`` raises :class:`UnmetError` for each of them.
    """
    kinds = Kinds(joint, steps)
    with contextlib.suppress(UnmetError):
        try:
            kinds.planned({}, 0, None)
        except UnmetError as error:
            _in_tiles(kinds, error, 0, 0)


def tile_sequence(
    joint: JointGraph, heads: Sequence[TileRegion], tiled: Callable[[JointGraph, Tiles], JointGraph]
) -> Iterator[list[tuple[TileRegion, int]]]:
    """What is tiled where it is not known what binds: more and more kinds, the widest first, then all in more tiles.

    Args:
        joint: an annotated graph in which means are sums.
        heads: of loss heads, whose rows are classes; they are taken where they are quicker than tiles of their rows,
            and at last in any case.
        tiled: a copy of a graph in which regions are loops.
    """
    kinds: list[list[TileRegion]] = []
    tiles: list[tuple[TileRegion, int]] = []
    for regions_so_far in TileRegions(joint).by_width():  # narrower ones only if the wider ones do not suffice
        known, kinds = len(kinds), list(by_kind(regions_so_far).values())
        first = [first_tiles(kind[0]) for kind in kinds]
        for count in range(known + 1, len(kinds) + 1):
            tiles = [(region, number) for kind, number in zip(kinds[:count], first, strict=False) for region in kind]
            yield instead_of_rows(joint, tiles, heads, tiled)
    for times in _MORE if kinds else ():
        tiles = [
            (region, min(times * count, region.most_tiles))
            for kind, count in zip(kinds, first, strict=True)
            for region in kind
        ]
        yield instead_of_rows(joint, tiles, heads, tiled)
    by_class = frozenset().union(*(operations_of(joint, head) for head in heads))
    others = [(region, count) for region, count in tiles if by_class.isdisjoint(operations_of(joint, region))]
    for times in (1, *_MORE) if heads else ():
        yield [*others, *((region, min(times * first_tiles(region), region.most_tiles)) for region in heads)]


def _planned(tiling: str | None, budget: int | float, steps: TilingSteps, kinds: Kinds) -> Lowered:
    """A plan within the budget.

    Raises:
        UnmetError: there is none; of all that was tried the one that needs least.
    """
    limit = int(budget * steps.share) if isinstance(budget, int) and tiling != "never" else None
    try:
        untiled = kinds.planned({}, budget, limit)
    except UnmetError as error:
        if limit is None:
            raise
        tiles, met = _in_tiles_either_way(kinds, error, int(budget), limit)
    else:
        tiles, met = {}, untiled
    if tiling != "auto" or kinds.is_met_by_known or not isinstance(met.chosen, Chosen):
        return met
    return _shortest(kinds, kinds.in_tiles(tiles), met, steps.share)


def _shortest(kinds: Kinds, tiles: Tiles, met: Lowered, share: float) -> Lowered:
    """A plan with the tiles that make the step shortest, as the chain of segments counts it.

    Args:
        kinds: what can be tiled.
        tiles: of the plan.
        met: a plan within the budget, which is returned if no other one is shorter.
        share: of the budget that may be used.
    """
    assert isinstance(met.chosen, Chosen)
    if _seconds(met) <= (1 + _WORTH) * kinds.seconds:
        return met
    budget = math.ceil(met.chosen.limit / share)
    for longer, tried in itertools.islice(kinds.by_segment(met.chosen.limit, tiles), _TRIED):
        if kinds.seconds + longer >= _ROUGHLY * _seconds(met):
            break
        if names_of(tried) != names_of(tiles):
            with contextlib.suppress(UnmetError):
                met = min(met, kinds.planned_in(tried, budget), key=_seconds)
    return met


def _seconds(lowered: Lowered) -> float:
    return sum(lowered.seconds.values())


def _in_tiles_either_way(kinds: Kinds, unmet: UnmetError, budget: int, limit: int) -> _InTiles:
    """A plan within the budget in few tiles; else from where no tiles lower what any operation needs.

    Arguments and errors as for :func:`_in_tiles`.
    """
    try:
        return _in_tiles(kinds, unmet, budget, limit)
    except UnmetError as error:
        first = error
    if not kinds.exist:
        raise first
    try:
        try:
            return {}, kinds.planned({}, budget, 0)
        except UnmetError as error:
            return _in_tiles(kinds, error, budget, 0)
    except UnmetError as error:
        raise min(first, error, key=lambda error: error.needs.bytes) from None


def _in_tiles(kinds: Kinds, unmet: UnmetError, budget: int, limit: int) -> _InTiles:
    """The first plan within the budget: with the quicker tiles of each loss head, of rows, or also of its classes.

    Arguments and errors as for :func:`_in_more_tiles`.
    """
    lowest: UnmetError | None = None
    for quicker, by_class in ((True, False), (False, False), (True, True)):
        try:
            return _in_more_tiles(kinds, unmet, budget, limit, quicker=quicker, by_class=by_class)
        except UnmetError as error:
            if lowest is None or error.needs.bytes < lowest.needs.bytes:
                lowest = error
        if not kinds.have_classes:
            break
    assert lowest is not None
    raise lowest


def _in_more_tiles(
    kinds: Kinds, unmet: UnmetError, budget: int, limit: int, *, quicker: bool, by_class: bool
) -> _InTiles:
    """The first plan within the budget, in more and more tiles, with these.

    Args:
        kinds: what can be tiled.
        unmet: what binds without tiles.
        budget: bytes.
        limit: while one operation needs more bytes, no plan is searched for unless that is so in any tiles.
        quicker: whether a head has tiles of classes where these are quicker than as many of rows.
        by_class: whether tiles of classes are tried where no tiles of rows lower what binds.

    Raises:
        UnmetError: there is none; of all that was tried the one that needs least.
    """
    tiles: dict[Kind, int] = {}
    lowest, done = unmet, set[Kind]()
    heads: dict[Kind, tuple[int, Needs]] = {}  # by classes, that are not in tiles, as they were tried last
    while True:
        kind = kinds.binding(lowest.needs, tiles, done, by_class)
        if kind is None and lowest.chosen is not None:
            raise lowest
        tried = dict(tiles)
        if kind is not None:
            count, needs = tiles.get(kind), lowest.needs
            if count is None and kind in heads:
                count, needs = heads[kind]
            count = kinds.more_tiles(kind, count, needs, limit)
            if quicker:
                kind, count = kinds.quicker(kind, count, done | heads.keys())
            tried = {**kinds.beside(kind, tiles), kind: count}
        try:
            bounded = kind is not None and lowest.chosen is None
            return tried, kinds.planned(tried, budget, limit if bounded else None)
        except UnmetError as error:
            alike = (error.chosen is None) == (lowest.chosen is None)
            if alike and error.needs.bytes > lowest.needs.bytes * _GAIN:
                assert kind is not None
                if not kinds.is_by_class(kind) or tried[kind] >= kinds.most_tiles(kind):
                    done.add(kind)
                    continue
                # Few tiles of classes may need more than many of rows, and more of them less than any.
                known, heads[kind] = heads.get(kind), (tried[kind], error.needs)
                if known is not None and error.needs.bytes > known[1].bytes * _GAIN:
                    done.add(kind)
                continue
            if not alike:
                done.clear()  # tiles that do not lower what one operation needs may lower the peak of a plan
            lowest, tiles = error, tried
            done.update(limited for limited, count in tiles.items() if count >= kinds.most_tiles(limited))
