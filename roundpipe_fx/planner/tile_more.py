"""Tile more: raise the number of tiles, one region class after another, until a plan fits the budget.

The first plan has no tiles. If it does not fit, the region class that contributes most bytes to the lowest peak is
tiled, all its regions alike, and the graph is planned again; then the next class, or the same one in more tiles. ::

    peak without tiles      9.0 GiB   logits 4.0, MLP 1.5 …     tile the loss head, 2 tiles
    head in 2 tiles         6.1 GiB   logits 2.0, MLP 1.5 …     4 tiles
    head in 4 tiles         5.2 GiB   MLP 1.5, logits 1.0 …     tile the MLPs too
    … and MLPs in 2 tiles   4.4 GiB                             fits 4.5 GiB

Tiles that only move the peak to another class are kept until that one is tiled as well; if that does not lower the peak
either, both are taken back.

A schedule's peak does not say which values are alive, so there the widest regions are tiled first. As long as a single
operation needs more than the budget, no plan is searched for; its operands and workspace decide which class is tiled
next.

The sequence of attempts depends on the budget. The smallest budget that an error names has therefore been planned for.
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
from roundpipe_fx.planner.region_classes import RegionClass, RegionClasses, Tiles
from roundpipe_fx.remat.choose import Unmet, write_refusal

_GAIN = 0.999
"""More tiles are kept if they lower the peak at least to this fraction."""

_InTiles: TypeAlias = tuple[Mapping[RegionClass, int], E | None]
"""Classes with their number of tiles, and the plan with these; ``None``: one that was refused for a smaller budget."""
_WAYS = ((True, False), (False, False), (True, True))
"""(choose the quicker tiles of each loss head, try vocabulary tiles at last): the quicker ones, rows only, or both."""


def tile_more(classes: RegionClasses[E], budget: int | float) -> Found[tuple[Tiles, E]] | Unmet:
    """Find the first plan within the budget, in more and more tiles, of regions between narrow values if these suffice.

    Args:
        budget: bytes or a fraction.
    """
    result = _tile_more(classes, budget)
    if isinstance(result, Found) or _bytes_limit(classes, budget) is None:
        return result
    return first_found((result, _tile_more(classes.of_all_kinds, budget)))


def _tile_more(classes: RegionClasses[E], budget: int | float) -> Found[tuple[Tiles, E]] | Unmet:
    """Find the first plan within the budget, in more and more tiles of the regions of some kinds."""
    setting = classes.setting
    if classes.space.widest_first:
        return _tile_widest_first(classes, budget, _bytes_limit(classes, budget))
    first = result = _tile_heaviest_first(classes, budget)
    if isinstance(first, Found):
        tiles, met = first.value
        assert met is not None
        return Found((classes.tiles_of(tiles), met))
    # The minimum depends on the budget that was tried, so plan for that minimum, until the plan meets it.
    while isinstance(result, Infeasible):
        # For another budget, other tiles are tried.
        unmet = result
        result = _tile_heaviest_first(classes, math.ceil(unmet.minimum / setting.share))
    asked, chosen = first.bottleneck.chosen, unmet.bottleneck.chosen
    assert asked is not None and chosen is not None
    text = write_refusal(dataclasses.replace(chosen, limit=asked.limit), unmet.minimum, budget)
    return dataclasses.replace(unmet, bottleneck=dataclasses.replace(unmet.bottleneck, text=text))


def _bytes_limit(classes: RegionClasses[E], budget: int | float) -> int | None:
    """The bytes that no single operation may exceed; ``None`` if nothing may be tiled."""
    tiles = isinstance(budget, int) and classes.setting.options.tiling != "never"
    return int(budget * classes.setting.share) if tiles else None


def _tile_widest_first(
    classes: RegionClasses[E], budget: int | float, limit: int | None
) -> Found[tuple[Tiles, E]] | Unmet:
    """Find the first plan within the budget, without tiles or with more and more regions tiled, the widest first.

    A tiling in which a single operation exceeds the budget is skipped, unless every tiling is like that. If no
    plan fits, the result is the attempt that needs least.
    """

    def planned(limit: int | None) -> Iterator[Found[tuple[Tiles, E]] | Unmet]:
        # Without tiles, then ever wider and narrower regions.
        for tiles in itertools.chain([()], classes.widest_first() if is_bounded else ()):
            result = classes.plan_in_tiles(tiles, budget, limit)
            if isinstance(result, Found):
                yield Found((tiles, result.value))
            elif not result.bottleneck.is_of_one_operation:
                yield result

    is_bounded = limit is not None
    tried = planned(limit)
    first = next(tried, None)
    return first_found(planned(None) if first is None else itertools.chain([first], tried))


def _tile_heaviest_first(classes: RegionClasses[E], budget: int | float) -> Found[_InTiles[E]] | Unmet:
    """Find a plan within the budget by tiling the classes that hold most of the peak.

    Otherwise, return the attempt that needs least.
    """
    limit = _bytes_limit(classes, budget)
    untiled = classes.plan({}, budget, limit)
    if isinstance(untiled, Found):
        return Found(({}, untiled.value))
    return untiled if limit is None else _try_few_then_many_tiles(classes, untiled, int(budget), limit)


def lower_peak_by_tiles(joint: JointGraph, setting: Setting, space: Space[E]) -> None:
    """Plan in more and more tiles, as long as they lower the peak.

    Args:
        joint: an annotated graph; not changed.
        space: receives each plan; its budget of 0 bytes is met by none.
    """
    classes = RegionClasses(joint, setting, space)
    untiled = classes.plan({}, 0, None)
    if isinstance(untiled, Infeasible):
        _try_head_tilings(classes, untiled, 0, 0)
        _try_head_tilings(classes.of_all_kinds, untiled, 0, 0)


def _try_few_then_many_tiles(
    classes: RegionClasses[E], unmet: Unmet, budget: int, limit: int
) -> Found[_InTiles[E]] | Unmet:
    """Find a plan in few tiles; else begin from the tiles with which no single operation can need less.

    Arguments and results as for :func:`_try_head_tilings`.
    """
    result = _try_head_tilings(classes, unmet, budget, limit)
    if isinstance(result, Found) or not classes.has_any:
        return result
    untiled = classes.plan({}, budget, 0)
    if isinstance(untiled, Found):
        return Found(({}, untiled.value))
    return first_found((result, _try_head_tilings(classes, untiled, budget, 0)))


def _try_head_tilings(classes: RegionClasses[E], unmet: Unmet, budget: int, limit: int) -> Found[_InTiles[E]] | Unmet:
    """Find the first plan within the budget among the ways to tile loss heads.

    Arguments and results as for :func:`_try_more_tiles`.
    """
    return first_found(
        # The second and third way differ from the first only if a head can be tiled along the vocabulary.
        _try_more_tiles(classes, unmet, budget, limit, quicker=quicker, by_vocabulary=by_vocabulary)
        for position, (quicker, by_vocabulary) in enumerate(_WAYS)
        if not position or classes.has_vocabulary_heads
    )


def _try_more_tiles(
    classes: RegionClasses[E], unmet: Unmet, budget: int, limit: int, *, quicker: bool, by_vocabulary: bool
) -> Found[_InTiles[E]] | Unmet:
    """Find the first plan within the budget, in more and more tiles of the class at the peak.

    Args:
        unmet: the refusal without tiles.
        limit: bytes; as long as a single operation needs more, no plan is searched for.
        quicker: whether a head gets vocabulary tiles if these are quicker than as many row tiles.
        by_vocabulary: whether vocabulary tiles are tried once no row tiles lower the peak.

    Returns:
        the plan, else the attempt that needs least.
    """
    tiles: dict[RegionClass, int] = {}
    lowest, done = unmet, set[RegionClass]()
    heads: dict[RegionClass, tuple[int, Unmet]] = {}  # along the vocabulary: the last attempt of each
    moved: tuple[Unmet, dict[RegionClass, int]] | None = None  # an attempt that another class's tiles go on from
    while True:
        # Each round tiles one more class, or the same one in more tiles. The loop ends when no class at the peak is
        # left.
        binding, held = (lowest, tiles) if moved is None else moved
        region_class = classes.find_class_at_peak(binding, held, done, by_vocabulary)
        if region_class is None and moved is not None:
            moved = None
            continue
        is_least = lowest.bottleneck.is_of_one_operation
        if region_class is None and not is_least:
            return lowest
        tried = dict(held)
        if region_class is not None:
            count = held.get(region_class)
            if count is None and region_class in heads:
                count, binding = heads[region_class]
            count = classes.choose_more_tiles(region_class, count, binding, limit)
            if quicker:
                region_class, count = classes.choose_quicker(region_class, count, done | heads.keys())
            tried = {**classes.drop_overlapping(region_class, held), region_class: count}
        result = classes.plan(tried, budget, limit if region_class is not None and is_least else None)
        if isinstance(result, Found):
            return Found((tried, result.value))
        # A minimum is of a single operation or of a plan; the two cannot be compared with each other.
        alike = (result.bottleneck.is_of_one_operation) == is_least
        if alike and result.minimum > lowest.minimum * _GAIN:
            assert region_class is not None
            if moved is not None:
                moved = None
                continue
            if not classes.is_vocabulary_head(region_class) or tried[region_class] >= classes.most_tiles(region_class):
                done.add(region_class)
                # The peak may be another class's now, whose tiles lower it only together with these.
                moved = None if is_least else (result, tried)
                continue
            # A few vocabulary tiles may need more than many row tiles, yet more of them less than any.
            known, heads[region_class] = heads.get(region_class), (tried[region_class], result)
            if known is not None and result.minimum > known[1].minimum * _GAIN:
                done.add(region_class)
            continue
        if not alike:
            done.clear()  # tiles that did not lower the need of one operation may lower the peak of a plan
        lowest, tiles, moved = result, tried, None
        done.update(limited for limited, count in tiles.items() if count >= classes.most_tiles(limited))
