"""The search for tiles: regions at whose work the peak is, one kind after another, until the budget is met.

Plans are made without tiles first. If the budget cannot be met, the regions that hold most at the lowest peak that was
found are tiled, all of the same kind alike, and the graph is replanned; then the next kind, or the same in more tiles.
While one operation alone needs more than the budget, no plan is searched for: what it needs says what is tiled next.

Where tiles are taken wherever they pay, what is saved and what is tiled is decided together then, segment by segment
(:mod:`roundpipe_fx.planner.segments_in_tiles`), and plans with the best of these tiles are made.

What is tried so depends on the budget. The least budget that an error names has therefore been planned for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from roundpipe_fx.analysis.tiling import TileRegion, TileRegions
from roundpipe_fx.budget import Found, Infeasible, Result, first_found
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.planner.class_tiles import instead_of_rows, operations_of
from roundpipe_fx.planner.kinds_of_regions import Kind, Kinds, Planned, Tiles, by_kind, first_tiles, names_of
from roundpipe_fx.planner.program_within_budget import within
from roundpipe_fx.remat.choose import Chosen, Unmet, refusal
from roundpipe_fx.torch_private import input_sizes

__all__ = ["plan_with_tiles", "tile_down", "tile_sequence"]

_MORE = (2, 4, 8)
"""Multiples of the first number of tiles that are tried where the bottleneck is not known."""
_WORTH = 0.02
"""Share by which a step is longer than with everything saved before other tiles are tried, each with a plan's time."""
_TRIED = 4
"""Number of the chain's best tiles for which plans are made: the chain counts not quite what plans need."""
_ROUGHLY = 1.01
"""Tiles are tried if the chain counts at most so many times the seconds of the shortest plan so far."""
_GAIN = 0.999
"""More tiles are worth it if they lower the peak to this share at most."""

_InTiles: TypeAlias = tuple[Mapping[Kind, int], Lowered | None]
"""Kinds with their number of tiles, and the plan with these; ``None``: one that was refused for a smaller budget."""
_WAYS = ((True, False), (False, False), (True, True))
"""With the quicker tiles of each loss head, of rows, or also of its classes, where it can have such."""


def plan_with_tiles(joint: JointGraph, budget: int | float, setting: Setting) -> Result[Lowered]:
    """Plan for a budget, with tiles as the option says.

    Args:
        joint: an annotated graph.
        budget: bytes or a share.
        setting: what else there is to know.
    """
    kinds, tiling = Kinds(joint, setting, within), setting.options.tiling
    result = _as_it_is_or_in_tiles(kinds, budget)
    if isinstance(result, Found):
        tiles, met = result.value
        assert met is not None
        return Found(_shortest(kinds, kinds.in_tiles(tiles), met) if tiling == "auto" else met)
    first = result
    while isinstance(result, Infeasible):
        # For another budget, other tiles are tried.
        unmet = result
        result = _as_it_is_or_in_tiles(kinds, math.ceil(unmet.minimum / setting.share))
    asked, chosen = first.bottleneck.chosen, unmet.bottleneck.chosen
    assert asked is not None and chosen is not None
    return Infeasible(
        minimum=unmet.minimum,
        bottleneck=refusal(dataclasses.replace(chosen, limit=asked.limit), unmet.minimum, budget),
        wants_sizes=tiling != "never" and bool(input_sizes(joint.module)),
    )


def tile_down(joint: JointGraph, setting: Setting, planned: Planned) -> None:
    """Have plans made in more and more tiles, as long as they lower the peak.

    Args:
        joint: an annotated graph; not changed.
        setting: what else there is to know.
        planned: plans each of them, and finds that none is within no bytes at all.
    """
    kinds = Kinds(joint, setting, planned)
    untiled = kinds.planned({}, 0, None)
    if isinstance(untiled, Infeasible):
        _in_tiles(kinds, untiled, 0, 0)


def tile_sequence(
    joint: JointGraph, heads: Sequence[TileRegion], tiled: Callable[[JointGraph, Tiles], JointGraph]
) -> Iterator[list[tuple[TileRegion, int]]]:
    """Yield tiles to try where the bottleneck is not known: more and more kinds, widest first, then all in more tiles.

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


def _as_it_is_or_in_tiles(kinds: Kinds, budget: int | float) -> Found[_InTiles] | Unmet:
    """A plan within the budget; else, of all that was tried, the one that needs least."""
    setting = kinds.setting
    tiles = isinstance(budget, int) and setting.options.tiling != "never"
    limit = int(budget * setting.share) if tiles else None
    untiled = kinds.planned({}, budget, limit)
    if isinstance(untiled, Found):
        return Found(({}, untiled.value))
    return untiled if limit is None else _in_tiles_either_way(kinds, untiled, int(budget), limit)


def _shortest(kinds: Kinds, tiles: Tiles, met: Lowered) -> Lowered:
    """A plan with the tiles that make the step shortest, as the chain of segments counts it.

    Args:
        kinds: what can be tiled.
        tiles: of the plan.
        met: a plan within the budget, which is returned if no other one is shorter.
    """
    assert isinstance(met.chosen, Chosen)
    if _seconds(met) <= (1 + _WORTH) * kinds.seconds:
        return met
    budget = math.ceil(met.chosen.limit / kinds.setting.share)
    for longer, tried in itertools.islice(kinds.by_segment(met.chosen.limit, tiles), _TRIED):
        if kinds.seconds + longer >= _ROUGHLY * _seconds(met):
            break
        if names_of(tried) != names_of(tiles):
            result = kinds.planned_in(tried, budget)
            met = min(met, result.value, key=_seconds) if isinstance(result, Found) else met
    return met


def _seconds(lowered: Lowered) -> float:
    return sum(lowered.seconds.values())


def _in_tiles_either_way(kinds: Kinds, unmet: Unmet, budget: int, limit: int) -> Found[_InTiles] | Unmet:
    """A plan within the budget in few tiles; else from where no tiles lower what any operation needs.

    Arguments and results as for :func:`_in_tiles`.
    """
    result = _in_tiles(kinds, unmet, budget, limit)
    if isinstance(result, Found) or not kinds.exist:
        return result
    untiled = kinds.planned({}, budget, 0)
    if isinstance(untiled, Found):
        return Found(({}, untiled.value))
    return first_found((result, _in_tiles(kinds, untiled, budget, 0)))


def _in_tiles(kinds: Kinds, unmet: Unmet, budget: int, limit: int) -> Found[_InTiles] | Unmet:
    """The first plan within the budget, of all ways to tile loss heads.

    Arguments and results as for :func:`_in_more_tiles`.
    """
    return first_found(
        _in_more_tiles(kinds, unmet, budget, limit, quicker=quicker, by_class=by_class)
        for place, (quicker, by_class) in enumerate(_WAYS)
        if not place or kinds.have_classes
    )


def _in_more_tiles(
    kinds: Kinds, unmet: Unmet, budget: int, limit: int, *, quicker: bool, by_class: bool
) -> Found[_InTiles] | Unmet:
    """The first plan within the budget, in more and more tiles, with these.

    Args:
        kinds: what can be tiled.
        unmet: what binds without tiles.
        budget: bytes.
        limit: while one operation needs more bytes, no plan is searched for unless that is so in any tiles.
        quicker: whether a head has tiles of classes where these are quicker than as many of rows.
        by_class: whether tiles of classes are tried where no tiles of rows lower what binds.

    Returns:
        the plan. If there is none, of all that was tried the one that needs least.
    """
    tiles: dict[Kind, int] = {}
    lowest, done = unmet, set[Kind]()
    heads: dict[Kind, tuple[int, Unmet]] = {}  # by classes, that are not in tiles, as they were tried last
    while True:
        kind = kinds.binding(lowest, tiles, done, by_class)
        is_least = lowest.bottleneck.chosen is None
        if kind is None and not is_least:
            return lowest
        tried = dict(tiles)
        if kind is not None:
            count, binding = tiles.get(kind), lowest
            if count is None and kind in heads:
                count, binding = heads[kind]
            count = kinds.more_tiles(kind, count, binding, limit)
            if quicker:
                kind, count = kinds.quicker(kind, count, done | heads.keys())
            tried = {**kinds.beside(kind, tiles), kind: count}
        result = kinds.planned(tried, budget, limit if kind is not None and is_least else None)
        if isinstance(result, Found):
            return Found((tried, result.value))
        alike = (result.bottleneck.chosen is None) == is_least
        if alike and result.minimum > lowest.minimum * _GAIN:
            assert kind is not None
            if not kinds.is_by_class(kind) or tried[kind] >= kinds.most_tiles(kind):
                done.add(kind)
                continue
            # Few tiles of classes may need more than many of rows, and more of them less than any.
            known, heads[kind] = heads.get(kind), (tried[kind], result)
            if known is not None and result.minimum > known[1].minimum * _GAIN:
                done.add(kind)
            continue
        if not alike:
            done.clear()  # tiles that do not lower what one operation needs may lower the peak of a plan
        lowest, tiles = result, tried
        done.update(limited for limited, count in tiles.items() if count >= kinds.most_tiles(limited))
