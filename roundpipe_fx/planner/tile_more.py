"""Tile more: regions at whose work the peak is, one kind after another, until the budget is met.

Plans are made without tiles first. If the budget cannot be met, the regions that hold most at the lowest peak that was
found are tiled, all of the same kind alike, and the graph is replanned; then the next kind, or the same in more tiles.
Where it is not known what is alive at the peak, as in a schedule's, the widest regions are tiled first. While one
operation alone needs more than the budget, no plan is searched for: what it needs says what is tiled next.

What is tried so depends on the budget. The least budget that an error names has therefore been planned for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from roundpipe_fx.budget import Found, Infeasible, first_found
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.planner.evaluation import E, Space
from roundpipe_fx.planner.kinds_of_regions import Kind, Kinds, Tiles
from roundpipe_fx.remat.choose import Unmet, refusal

_GAIN = 0.999
"""More tiles are worth it if they lower the peak to this share at most."""

_InTiles: TypeAlias = tuple[Mapping[Kind, int], E | None]
"""Kinds with their number of tiles, and the plan with these; ``None``: one that was refused for a smaller budget."""
_WAYS = ((True, False), (False, False), (True, True))
"""With the quicker tiles of each loss head, of rows, or also of its classes, where it can have such."""


def tile_more(kinds: Kinds[E], budget: int | float) -> Found[tuple[Tiles, E]] | Unmet:
    """A plan within the budget and its tiles, the first in more and more of them.

    Args:
        kinds: what can be tiled.
        budget: bytes or a share.
    """
    setting = kinds.setting
    if kinds.space.widest_first:
        return _widest_first(kinds, budget, _limit(kinds, budget))
    first = result = _most_held_first(kinds, budget)
    if isinstance(first, Found):
        tiles, met = first.value
        assert met is not None
        return Found((kinds.in_tiles(tiles), met))
    # The minimum found depends on the budget, so it is planned for itself until the named budget is met.
    while isinstance(result, Infeasible):
        # For another budget, other tiles are tried.
        unmet = result
        result = _most_held_first(kinds, math.ceil(unmet.minimum / setting.share))
    asked, chosen = first.bottleneck.chosen, unmet.bottleneck.chosen
    assert asked is not None and chosen is not None
    text = refusal(dataclasses.replace(chosen, limit=asked.limit), unmet.minimum, budget)
    return dataclasses.replace(unmet, bottleneck=dataclasses.replace(unmet.bottleneck, text=text))


def _limit(kinds: Kinds[E], budget: int | float) -> int | None:
    """The bytes that no operation alone may exceed; ``None``: nothing is tiled."""
    tiles = isinstance(budget, int) and kinds.setting.options.tiling != "never"
    return int(budget * kinds.setting.share) if tiles else None


def _widest_first(kinds: Kinds[E], budget: int | float, limit: int | None) -> Found[tuple[Tiles, E]] | Unmet:
    """The first plan within the budget, as the graph is or with more and more regions in tiles, the widest first.

    No plan is searched for where one operation alone needs more than the budget, unless that is so in any tiles. If
    there is none, the result is that of the attempt that needs least.
    """

    def planned(limit: int | None) -> Iterator[Found[tuple[Tiles, E]] | Unmet]:
        # Without tiles, then ever wider and narrower regions.
        for tiles in itertools.chain([()], kinds.widest_first() if is_bounded else ()):
            result = kinds.planned_in(tiles, budget, limit)
            if isinstance(result, Found):
                yield Found((tiles, result.value))
            elif not result.bottleneck.is_of_one_operation:
                yield result

    is_bounded = limit is not None
    tried = planned(limit)
    first = next(tried, None)
    return first_found(planned(None) if first is None else itertools.chain([first], tried))


def _most_held_first(kinds: Kinds[E], budget: int | float) -> Found[_InTiles[E]] | Unmet:
    """A plan within the budget, with those regions in tiles that hold most at the peak; else, of all that was tried,
    the one that needs least."""
    limit = _limit(kinds, budget)
    untiled = kinds.planned({}, budget, limit)
    if isinstance(untiled, Found):
        return Found(({}, untiled.value))
    return untiled if limit is None else _in_tiles_either_way(kinds, untiled, int(budget), limit)


def tile_down(joint: JointGraph, setting: Setting, space: Space[E]) -> None:
    """Have plans made in more and more tiles, as long as they lower the peak.

    Args:
        joint: an annotated graph; not changed.
        setting: what else there is to know.
        space: plans each of them, and finds that none is within no bytes at all.
    """
    kinds = Kinds(joint, setting, space)
    untiled = kinds.planned({}, 0, None)
    if isinstance(untiled, Infeasible):
        _in_tiles(kinds, untiled, 0, 0)


def _in_tiles_either_way(kinds: Kinds[E], unmet: Unmet, budget: int, limit: int) -> Found[_InTiles[E]] | Unmet:
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


def _in_tiles(kinds: Kinds[E], unmet: Unmet, budget: int, limit: int) -> Found[_InTiles[E]] | Unmet:
    """The first plan within the budget, of all ways to tile loss heads.

    Arguments and results as for :func:`_in_more_tiles`.
    """
    return first_found(
        # Three orders of trying; later ones only if there are heads by classes.
        _in_more_tiles(kinds, unmet, budget, limit, quicker=quicker, by_class=by_class)
        for position, (quicker, by_class) in enumerate(_WAYS)
        if not position or kinds.have_classes
    )


def _in_more_tiles(
    kinds: Kinds[E], unmet: Unmet, budget: int, limit: int, *, quicker: bool, by_class: bool
) -> Found[_InTiles[E]] | Unmet:
    """The first plan within the budget, in more and more tiles, with these.

    Args:
        kinds: what can be tiled.
        unmet: what binds without tiles.
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
        # One class of regions more, or the same in more tiles, in each round; it ends when no class is left that helps.
        kind = kinds.binding(lowest, tiles, done, by_class)
        is_least = lowest.bottleneck.is_of_one_operation
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
            tried = {**kinds.without_overlapping(kind, tiles), kind: count}
        result = kinds.planned(tried, budget, limit if kind is not None and is_least else None)
        if isinstance(result, Found):
            return Found((tried, result.value))
        # Two kinds of minimum: of one operation, and of a plan. They cannot be compared with each other.
        alike = (result.bottleneck.is_of_one_operation) == is_least
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
