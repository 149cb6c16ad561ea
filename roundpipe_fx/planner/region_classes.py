"""Region classes: the tile regions of a graph, grouped by equal operations on equal shapes and tiled alike.

A transformer of 28 layers has one class of 28 MLP regions, one of 28 attention regions and one of the loss head. For a
plan that does not fit, :meth:`RegionClasses.find_class_at_peak` picks the class that contributes most bytes to the
peak, of the classes found so far. Regions are looked for from the widest value at the peak down, until a class
contributes something. In GiB::

    alive at the first peak     logits 4.0, inner values of 28 MLPs 14.0, x 0.1     the loss head: no MLP is known yet
    with the head in tiles                  inner values of 28 MLPs 14.0, x 0.1     the MLPs

Plans that were refused are remembered here, so none is searched for twice. For one tiling::

    budget 4      refused before any search: a single operation needs 5         remembered: 5
    budget 3      refused at once: 5
    budget 10     refused after the search: the lowest peak is 12               remembered: 12
    budget 11     refused at once: 12
    budget 13     nothing is searched for: the plan with that peak fits
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias

from torch import fx

from roundpipe_fx.analysis.tiling import KINDS, NARROW, RegionKind, TileRegion, TileRegions, elements
from roundpipe_fx.budget import Found
from roundpipe_fx.compiler.operations_in_tiles import split_means, tile_graph
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.planner.evaluation import E, Space
from roundpipe_fx.planner.segments_in_tiles import tilings_by_segment
from roundpipe_fx.planner.vocabulary_tiles import (
    find_vocabulary_regions,
    may_be_quicker,
    replace_row_tiles,
    replaced_operations,
    total_seconds,
)
from roundpipe_fx.remat.choose import Bottleneck, Unmet

_ROWS = 128
"""Rows that the first tiles have at least: matrix products with fewer rows are slower."""
_VOCABULARY = 1024
"""Words that the first vocabulary tiles have at least: a head's input gradient is a sum over tiles, rounded by each."""

_MORE = (2, 4, 8)
"""Factors by which the first number of tiles is raised when the bottleneck is unknown."""

Tiles: TypeAlias = Sequence[tuple[TileRegion, int]]
"""Regions with their number of tiles."""
RegionClass: TypeAlias = tuple[Any, ...]
"""A key that is equal for regions with equal operations on equal shapes."""
_TilingKey: TypeAlias = frozenset[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class _Refusals:
    """Plans that were refused.

    Attributes:
        least: by tiling, the largest need of a single operation, if that exceeded a limit.
        fitting: by tiling, the least limit that no single operation exceeded.
        lowest: by tiling, the lowest peak of any plan; it does not depend on the budget.
    """

    least: dict[_TilingKey, Unmet] = field(default_factory=dict)
    fitting: dict[_TilingKey, int] = field(default_factory=dict)
    lowest: dict[_TilingKey, Unmet] = field(default_factory=dict)


class RegionClasses(Generic[E]):
    """The region classes of a graph, found lazily, and the refusals of plans with tiles.

    Args:
        joint: an annotated graph; not changed.
        kinds: of the regions that are looked for.
    """

    def __init__(
        self,
        joint: JointGraph,
        setting: Setting,
        space: Space[E],
        kinds: Sequence[RegionKind] = (NARROW,),
        refusals: _Refusals | None = None,
    ) -> None:
        self.setting, self.space = setting, space
        self._joint, self._kinds = joint, kinds
        self._refusals = _Refusals() if refusals is None else refusals
        self._narrowed_by: dict[RegionClass, frozenset[str]] = {}
        self._compared_in: dict[frozenset[tuple[str, ...]], JointGraph] = {}
        self._quicker: dict[tuple[RegionClass, RegionClass, int], int | None] = {}

    @functools.cached_property
    def of_all_kinds(self) -> RegionClasses[E]:
        """The classes of regions of every kind.

        Regions that have values as wide as their widest at their border gain less, and may take operations that wider
        tiles would divide, so they are for budgets that cannot be met without them.
        """
        return RegionClasses(self._joint, self.setting, self.space, KINDS, self._refusals)

    @functools.cached_property
    def _graph(self) -> JointGraph:
        return split_means(self._joint, self.setting)

    @functools.cached_property
    def _regions(self) -> TileRegions:
        return TileRegions(self._graph, self._kinds)

    @functools.cached_property
    def _heads(self) -> dict[RegionClass, list[TileRegion]]:
        """Loss heads that may be tiled along the vocabulary."""
        return group_by_class(find_vocabulary_regions(self._graph, self.setting.costs))

    @functools.cached_property
    def _named(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self._graph.graph.nodes}

    @functools.cached_property
    def seconds(self) -> float:
        """Modelled seconds of the graph without tiles, with nothing recomputed."""
        return total_seconds(self._joint)

    @property
    def has_any(self) -> bool:
        """Return whether the graph has a region."""
        return bool(self._regions.find_wide_regions(0) or self._heads)

    def most_tiles(self, region_class: RegionClass) -> int:
        """The largest possible number of tiles of a class."""
        return self._regions_of(region_class)[0].most_tiles

    def plan(self, tiles: Mapping[RegionClass, int], budget: int | float, limit: int | None) -> Found[E | None] | Unmet:
        """Plan for a budget with a number of tiles for each class; known refusals are returned without a search.

        Args:
            tiles: empty for the graph without tiles.
            budget: bytes or a fraction.
            limit: bytes; if a single operation needs more, no plan is searched for. ``None``: always search.

        Returns:
            the plan; ``None`` for one that was refused for a smaller budget and stays within this one.
        """
        refusals, key = self._refusals, tiling_key(self.tiles_of(tiles))
        least, lowest = refusals.least.get(key), refusals.lowest.get(key)
        if limit is not None and least is not None and least.minimum > limit:
            return least
        is_searched = limit is None or least is not None or limit >= refusals.fitting.get(key, math.inf)
        if lowest is not None and is_searched:
            return lowest if budget * self.setting.share < lowest.minimum else Found(None)
        result = self.plan_in_tiles(self.tiles_of(tiles), budget, limit)
        if isinstance(result, Found):
            return result
        if result.bottleneck.is_of_one_operation:
            refusals.least[key] = result
        else:
            refusals.lowest[key] = result
            if limit is not None:
                refusals.fitting[key] = min(limit, refusals.fitting.get(key, limit))
        return result

    def tiles_of(self, tiles: Mapping[RegionClass, int]) -> Tiles:
        """List the regions of classes, with their number of tiles."""
        return [(region, count) for region_class, count in tiles.items() for region in self._regions_of(region_class)]

    def plan_in_tiles(self, tiles: Tiles, budget: int | float, limit: int | None = None) -> Found[E] | Unmet:
        """Plan for a budget with a number of tiles for each region; arguments as for :meth:`plan`."""
        graph = self._compared_in.pop(tiling_key(tiles), None) if tiles else self._joint
        self._compared_in.clear()
        if graph is None:
            graph = tile_graph(self._graph, tiles, self.setting)
        return self.space.planned(graph, self.setting, budget, limit)

    def _tile_for_comparison(self, joint: JointGraph, tiles: Tiles) -> JointGraph:
        """Tile a graph to compare its seconds, and keep it: the next plan may be for it."""
        self._compared_in[tiling_key(tiles)] = graph = tile_graph(joint, tiles, self.setting)
        return graph

    def tilings_by_segment(self, limit: int, tiles: Tiles) -> Iterable[tuple[float, Tiles]]:
        """Yield the best tilings for ever fewer bytes, with their seconds.

        Args:
            tiles: of a plan; loss heads that it tiles along the vocabulary stay so.
        """
        heads = [region for region, _ in tiles if region.online]
        by_vocabulary = self._replaced_operations(heads)
        regions = self._regions.find_wide_regions(0)
        others = [region for region in regions if by_vocabulary.isdisjoint(replaced_operations(self._graph, region))]
        tier = self.space.tier(self._joint, self.setting)
        return tilings_by_segment(self._graph, [*others, *heads], limit, self.setting, tier)

    def widest_first(self) -> Iterator[Tiles]:
        """Yield tilings for an unknown bottleneck: more and more classes, widest first, then all in more tiles.

        The last ones tile loss heads along the vocabulary, even if that is not quicker. Of all kinds of regions,
        tilings with narrow borders alone are left out: they were tried.
        """
        for tiles in self._all_widest_first():
            if len(self._kinds) == 1 or any(region.kind is not NARROW for region, _ in tiles):
                yield tiles

    def _all_widest_first(self) -> Iterator[Tiles]:
        heads = [head for region_class in self._heads.values() for head in region_class]
        classes: list[list[TileRegion]] = []
        first: list[int] = []
        tiles: Tiles = []

        def of_classes(times: int, count: int) -> Tiles:
            in_tiles = [
                (region, min(times * number, region.most_tiles))
                for region_class, number in zip(classes[:count], first, strict=False)
                for region in region_class
            ]
            return replace_row_tiles(self._graph, in_tiles, heads, self._tile_for_comparison)

        # Narrower regions only if the wider ones do not suffice. `iterate_by_width` yields each region once, so a
        # new search begins here.
        for regions_so_far in TileRegions(self._graph, self._kinds).iterate_by_width():
            known, classes = len(classes), list(group_by_class(regions_so_far).values())
            first = [choose_first_tiles(region_class[0]) for region_class in classes]
            for count in range(known + 1, len(classes) + 1):
                tiles = of_classes(1, count)
                yield tiles
        for times in _MORE if classes else ():
            tiles = of_classes(times, len(classes))
            yield tiles
        by_vocabulary = self._replaced_operations(heads)
        others = [
            candidate for candidate in tiles if by_vocabulary.isdisjoint(replaced_operations(self._graph, candidate[0]))
        ]
        for times in (1, *_MORE) if heads else ():
            yield [*others, *((head, min(times * choose_first_tiles(head), head.most_tiles)) for head in heads)]

    def _replaced_operations(self, regions: Iterable[TileRegion]) -> frozenset[str]:
        """Names of the operations that the loops of some regions replace."""
        return frozenset().union(*(replaced_operations(self._graph, region) for region in regions))

    @property
    def has_vocabulary_heads(self) -> bool:
        """Return whether a loss head can be tiled along the vocabulary."""
        return bool(self._heads)

    def find_class_at_peak(
        self, unmet: Unmet, tiles: Collection[RegionClass], done: Collection[RegionClass], by_vocabulary: bool
    ) -> RegionClass | None:
        """Pick the class, of those found so far, that contributes most bytes to the peak; ``None``: none contributes.

        Args:
            tiles: the tiled classes; they take precedence over others with the same operations.
            done: classes to leave out.
            by_vocabulary: whether to consider vocabulary tiles of loss heads that have none yet.
        """
        bottleneck = unmet.bottleneck
        values = [self._named[name] for name, _ in bottleneck.live if name in self._named]
        running = self._find_running(bottleneck)
        values += [value for user in running for value in (user, *user.all_input_nodes)]
        # A region has no value much wider than its widest, so narrower regions are searched for only if wider ones hold
        # nothing.
        for width in sorted({elements(value) for value in values} | {0}, reverse=True):
            # All regions found so far are among these: a narrow class that is known is compared with the wide ones.
            classes = group_by_class(self._regions.find_wide_regions(width))
            held = self._held_bytes_by_class(bottleneck, running, classes, done)
            if (by_vocabulary and (done or not held)) or any(
                self._regions_of(region_class)[0].online for region_class in tiles
            ):
                classes |= {
                    region_class: heads
                    for region_class, heads in self._heads.items()
                    if elements(heads[0].widest) >= width
                }
                first = sorted(classes, key=lambda region_class: region_class not in tiles)
                held = self._held_bytes_by_class(bottleneck, running, first, done)
            if held:
                return max(held, key=held.__getitem__)
        return None

    def _held_bytes_by_class(
        self,
        bottleneck: Bottleneck,
        running: Sequence[fx.Node],
        classes: Iterable[RegionClass],
        done: Collection[RegionClass],
    ) -> dict[RegionClass, int]:
        names = {
            region_class: self._names_narrowed_by(region_class) for region_class in classes if region_class not in done
        }
        return _held_bytes(bottleneck, running, names)

    def _names_narrowed_by(self, region_class: RegionClass) -> frozenset[str]:
        """Names of the values that are narrower, or gone, once a class is tiled."""
        if region_class not in self._narrowed_by:
            self._narrowed_by[region_class] = self._replaced_operations(self._regions_of(region_class))
        return self._narrowed_by[region_class]

    def _find_running(self, bottleneck: Bottleneck) -> list[fx.Node]:
        """Find the operation at the peak in this graph; for a slice that tiling has removed, its neighbours."""
        if bottleneck.operation is None:
            return []
        node = bottleneck.operation.node
        neighbours = [node] if node.name in self._named else [*node.all_input_nodes, *node.users]
        return [self._named[operation.name] for operation in neighbours if operation.name in self._named]

    def is_vocabulary_head(self, region_class: RegionClass) -> bool:
        """Return whether a class is of loss heads tiled along the vocabulary."""
        return bool(self._regions_of(region_class)[0].online)

    def choose_quicker(
        self, region_class: RegionClass, count: int, done: Collection[RegionClass]
    ) -> tuple[RegionClass, int]:
        """Replace row tiles of a loss head by vocabulary tiles if the same number is modelled to be quicker.

        Args:
            count: number of tiles.
            done: classes to leave out.
        """
        tiles = self.tiles_of({region_class: count})
        if not any(may_be_quicker(region, count) for region, count in tiles if not region.online):
            return region_class, count
        for other, heads in self._heads.items():
            if (
                other in done
                or other == region_class
                or self._names_narrowed_by(other).isdisjoint(self._names_narrowed_by(region_class))
            ):
                continue
            key = region_class, other, count
            if key not in self._quicker:
                chosen = replace_row_tiles(self._graph, tiles, heads, self._tile_for_comparison)
                self._quicker[key] = next((number for region, number in chosen if region.online), None)
            number = self._quicker[key]
            if number is not None:
                return other, number
        return region_class, count

    def drop_overlapping(self, region_class: RegionClass, tiles: Mapping[RegionClass, int]) -> dict[RegionClass, int]:
        """Leave out the classes that share operations with one: a head's row tiles, if it gets vocabulary tiles."""
        names = self._names_narrowed_by(region_class)
        return {
            other: count
            for other, count in tiles.items()
            if other == region_class or not names & self._names_narrowed_by(other)
        }

    def choose_more_tiles(self, region_class: RegionClass, tiles: int | None, unmet: Unmet, limit: int) -> int:
        """Double the number of tiles, or raise it until the loop's workspace fits the bytes that the limit leaves."""
        region = self._regions_of(region_class)[0]
        if tiles is None:
            return choose_first_tiles(region)
        times, operation = 2, unmet.bottleneck.operation
        if operation is not None and _loop_of(operation.node) in _loops([region]):
            workspace = operation.workspace
            left = limit - (unmet.minimum - workspace)
            if 0 < left < workspace:
                times = max(times, 2 ** math.ceil(math.log2(workspace / left)))
        return min(times * tiles, region.most_tiles)

    def _regions_of(self, region_class: RegionClass) -> list[TileRegion]:
        rows = group_by_class(self._regions.regions)
        return rows[region_class] if region_class in rows else self._heads[region_class]


def _held_bytes(
    bottleneck: Bottleneck, running: Sequence[fx.Node], classes: Mapping[RegionClass, Collection[str]]
) -> dict[RegionClass, int]:
    """Bytes of the peak that each class holds; the class of the running operation holds its workspace.

    Args:
        running: the operation at the peak and its operands.
        classes: names of the values of each class; a name in several belongs to the first.
    """
    class_of: dict[str, RegionClass] = {}
    for region_class, names in classes.items():
        for name in names:
            class_of.setdefault(name, region_class)
    held: dict[RegionClass, int] = {}
    for name, size in bottleneck.live:
        # Values that no region makes stay whole with any tiles, however many bytes they have.
        if name in class_of:
            held[class_of[name]] = held.get(class_of[name], 0) + size
    if bottleneck.operation is not None:
        loop = _loop_of(bottleneck.operation.node)
        classes_held = [class_of.get(loop or ""), *(class_of.get(node.name) for node in running)]
        first = next((region_class for region_class in classes_held if region_class is not None), None)
        if first is not None:
            held[first] = held.get(first, 0) + max(bottleneck.operation.workspace, 1)
    return held


def _loops(regions: Iterable[TileRegion]) -> set[str | None]:
    return {region.widest.name for region in regions}


def _loop_of(node: fx.Node) -> str | None:
    """The name of the widest value in a loop; ``None`` if the operation is not a loop."""
    return node.target.widest.name if isinstance(node.target, TileLoop) else None


def tiling_key(tiles: Tiles) -> _TilingKey:
    """A key that distinguishes tilings of one graph."""
    return frozenset(
        (region.widest.name, *region.online, str(len(region.members)), str(count)) for region, count in tiles
    )


def group_by_class(regions: Iterable[TileRegion]) -> dict[RegionClass, list[TileRegion]]:
    """Group regions with equal operations on equal shapes."""
    by_class: dict[RegionClass, list[TileRegion]] = {}
    for region in regions:
        targets = tuple(str(node.target) for node in region.members)
        key = tuple(region.widest.meta["val"].shape), region.rows, region.scalar is None, targets
        by_class.setdefault(key, []).append(region)
    return by_class


def choose_first_tiles(region: TileRegion) -> int:
    """Choose the first number of tiles to try, a power of two."""
    tiles, least = 2, _VOCABULARY if region.online else _ROWS
    while region.rows // (2 * tiles) >= least:
        tiles *= 2
    return min(tiles, region.most_tiles)
