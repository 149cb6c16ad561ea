"""The tile regions of a graph by kind: those that do the same on the same shapes are tiled alike.

What is known of plans in tiles is kept here, and what is tiled next is said: the kind that holds most of what binds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeAlias

from torch import fx

from roundpipe_fx.analysis.tiling import TileRegion, TileRegions, elements
from roundpipe_fx.budget import Found
from roundpipe_fx.compiler.operations_in_tiles import summed, tiled
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.planner.class_tiles import class_regions, instead_of_rows, may_be_quicker, operations_of, seconds_of
from roundpipe_fx.planner.evaluation import E, Space
from roundpipe_fx.planner.segments_in_tiles import tilings_by_segment
from roundpipe_fx.remat.choose import Bottleneck, Unmet

_ROWS = 128
"""A tile begins with at least so many rows: matrix products with fewer are slower."""
_CLASSES = 1024
"""The same for classes: gradients of what a head reads are summed over tiles, and rounded once for each."""

_MORE = (2, 4, 8)
"""Multiples of the first number of tiles that are tried where the bottleneck is not known."""

Tiles: TypeAlias = Sequence[tuple[TileRegion, int]]
"""Regions with their number of tiles."""
Kind: TypeAlias = tuple[Any, ...]
"""The same for regions that do the same on the same shapes."""
_TilesOfKinds: TypeAlias = frozenset[tuple[Kind, int]]
"""Kinds with their number of tiles."""


class Kinds(Generic[E]):
    """The regions of a graph by kind, found as far as they are asked for, and what is known of plans in tiles.

    Args:
        joint: an annotated graph; not changed.
        setting: what else there is to know.

    Attributes:
        setting: what else there is to know.
    """

    def __init__(self, joint: JointGraph, setting: Setting, space: Space[E]) -> None:
        self.setting, self.space = setting, space
        self._joint = joint
        self._least: dict[_TilesOfKinds, Unmet] = {}
        """What one operation needs alone; found where it is more than a limit."""
        self._fitting: dict[_TilesOfKinds, int] = {}
        """The least limit that no operation alone was found to exceed."""
        self._holding_of: dict[Kind, frozenset[str]] = {}
        self._compared_in: dict[frozenset[tuple[str, ...]], JointGraph] = {}
        self._quicker: dict[tuple[Kind, Kind, int], int | None] = {}
        self._lowest: dict[_TilesOfKinds, Unmet] = {}
        """The lowest peak of a plan; which that is does not depend on the budget."""

    @functools.cached_property
    def _graph(self) -> JointGraph:
        return summed(self._joint, self.setting)

    @functools.cached_property
    def _regions(self) -> TileRegions:
        return TileRegions(self._graph)

    @functools.cached_property
    def _heads(self) -> dict[Kind, list[TileRegion]]:
        """Loss heads whose rows are classes, by kind."""
        return by_kind(class_regions(self._graph, self.setting.costs))

    @functools.cached_property
    def _named(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self._graph.graph.nodes}

    @functools.cached_property
    def seconds(self) -> float:
        """Modelled seconds of the graph without tiles, with nothing recomputed."""
        return seconds_of(self._joint)

    @property
    def exist(self) -> bool:
        """Return whether there are any."""
        return bool(self._regions.as_wide_as(0) or self._heads)

    def most_tiles(self, kind: Kind) -> int:
        """The largest number of tiles that there can be."""
        return self._of(kind)[0].most_tiles

    def planned(self, tiles: Mapping[Kind, int], budget: int | float, limit: int | None) -> Found[E | None] | Unmet:
        """A plan for a budget, with kinds in so many tiles. One that is known not to be there is not searched for.

        Args:
            tiles: by kind; none: the graph as it was.
            budget: bytes or a share.
            limit: where one operation alone needs more bytes, no plan is searched for; ``None``: one always is.

        Returns:
            the plan; ``None`` for one that was refused for a smaller budget, and stays within this one.
        """
        key = frozenset(tiles.items())
        least, lowest = self._least.get(key), self._lowest.get(key)
        if limit is not None and least is not None and least.minimum > limit:
            return least
        is_searched = limit is None or least is not None or limit >= self._fitting.get(key, math.inf)
        if lowest is not None and is_searched:
            return lowest if budget * self.setting.share < lowest.minimum else Found(None)
        result = self.planned_in(self.in_tiles(tiles), budget, limit)
        if isinstance(result, Found):
            return result
        if result.bottleneck.is_of_one_operation:
            self._least[key] = result
        else:
            self._lowest[key] = result
            if limit is not None:
                self._fitting[key] = min(limit, self._fitting.get(key, limit))
        return result

    def in_tiles(self, tiles: Mapping[Kind, int]) -> Tiles:
        """The regions of kinds, with their number of tiles."""
        return [(region, count) for kind, count in tiles.items() for region in self._of(kind)]

    def planned_in(self, tiles: Tiles, budget: int | float, limit: int | None = None) -> Found[E] | Unmet:
        """A plan for a budget, with regions in so many tiles.

        Args:
            tiles: of regions; none: the graph as it was.
            budget: bytes or a share.
            limit: where one operation alone needs more bytes, no plan is searched for; ``None``: one always is.
        """
        graph = self._compared_in.pop(names_of(tiles), None) if tiles else self._joint
        self._compared_in.clear()
        if graph is None:
            graph = tiled(self._graph, tiles, self.setting)
        return self.space.planned(graph, self.setting, budget, limit)

    def _compared(self, joint: JointGraph, tiles: Tiles) -> JointGraph:
        """A graph whose seconds are compared, and which may be planned then."""
        self._compared_in[names_of(tiles)] = graph = tiled(joint, tiles, self.setting)
        return graph

    def by_segment(self, limit: int, tiles: Tiles) -> Iterable[tuple[float, Tiles]]:
        """The tiles of regions that are best for a number of bytes and for ever fewer, with seconds.

        Args:
            tiles: of a plan. Loss heads that have tiles of classes there have such.
        """
        heads = [region for region, _ in tiles if region.online]
        by_class = self._covered(heads)
        regions = self._regions.as_wide_as(0)
        others = [region for region in regions if by_class.isdisjoint(operations_of(self._graph, region))]
        tier = self.space.tier(self._joint, self.setting)
        return tilings_by_segment(self._graph, [*others, *heads], limit, self.setting, tier)

    def widest_first(self) -> Iterator[Tiles]:
        """Yield tiles to try where the bottleneck is not known: more and more kinds, widest first, then all in more
        tiles. At last loss heads have tiles of their classes, even where these are not quicker."""
        heads = [head for kind in self._heads.values() for head in kind]
        kinds: list[list[TileRegion]] = []
        first: list[int] = []
        tiles: Tiles = []

        def of_kinds(times: int, count: int) -> Tiles:
            in_tiles = [
                (region, min(times * number, region.most_tiles))
                for kind, number in zip(kinds[:count], first, strict=False)
                for region in kind
            ]
            return instead_of_rows(self._graph, in_tiles, heads, self._compared)

        # Narrower ones only if the wider ones do not suffice. Regions are looked for anew: each is yielded but once.
        for regions_so_far in TileRegions(self._graph).by_width():
            known, kinds = len(kinds), list(by_kind(regions_so_far).values())
            first = [first_tiles(kind[0]) for kind in kinds]
            for count in range(known + 1, len(kinds) + 1):
                tiles = of_kinds(1, count)
                yield tiles
        for times in _MORE if kinds else ():
            tiles = of_kinds(times, len(kinds))
            yield tiles
        by_class = self._covered(heads)
        others = [one for one in tiles if by_class.isdisjoint(operations_of(self._graph, one[0]))]
        for times in (1, *_MORE) if heads else ():
            yield [*others, *((head, min(times * first_tiles(head), head.most_tiles)) for head in heads)]

    def _covered(self, regions: Iterable[TileRegion]) -> frozenset[str]:
        """Names of the operations that the loops of some regions replace."""
        return frozenset().union(*(operations_of(self._graph, region) for region in regions))

    @property
    def have_classes(self) -> bool:
        """Return whether there are loss heads that can have tiles of their classes."""
        return bool(self._heads)

    def binding(self, unmet: Unmet, tiles: Collection[Kind], done: Collection[Kind], by_class: bool) -> Kind | None:
        """The kind that holds most of what binds; ``None``: none holds any.

        Args:
            tiles: the kinds that are in tiles. Of kinds with the same operations, these hold them.
            done: kinds that are left out.
            by_class: whether classes of loss heads are among them that are not in tiles of classes.
        """
        needs = unmet.bottleneck
        values = [self._named[name] for name, _ in needs.live if name in self._named]
        running = self._running(needs)
        values += [value for user in running for value in (user, *user.all_input_nodes)]
        # No region has values that are much wider than its widest.
        for width in sorted({elements(value) for value in values} | {0}, reverse=True):
            kinds = by_kind(self._regions.as_wide_as(width))
            held = _held(needs, running, {kind: self._holding(kind) for kind in kinds if kind not in done})
            if (by_class and (done or not held)) or any(self._of(kind)[0].online for kind in tiles):
                kinds |= {kind: heads for kind, heads in self._heads.items() if elements(heads[0].widest) >= width}
                first = sorted(kinds, key=lambda kind: kind not in tiles)
                held = _held(needs, running, {kind: self._holding(kind) for kind in first if kind not in done})
            if held:
                return max(held, key=held.__getitem__)
        return None

    def _holding(self, kind: Kind) -> frozenset[str]:
        """Names of what is not as wide, or not at all, with the regions of a kind in tiles."""
        if kind not in self._holding_of:
            self._holding_of[kind] = self._covered(self._of(kind))
        return self._holding_of[kind]

    def _running(self, needs: Bottleneck) -> list[fx.Node]:
        """The operation during which bytes are needed; of a slice that is no longer there, what it was between."""
        if needs.operation is None:
            return []
        node = needs.operation.node
        neighbours = [node] if node.name in self._named else [*node.all_input_nodes, *node.users]
        return [self._named[operation.name] for operation in neighbours if operation.name in self._named]

    def is_by_class(self, kind: Kind) -> bool:
        """Return whether these are loss heads whose rows are classes."""
        return bool(self._of(kind)[0].online)

    def quicker(self, kind: Kind, count: int, done: Collection[Kind]) -> tuple[Kind, int]:
        """A head's classes instead of its rows, where as many tiles of them take fewer modelled seconds.

        Args:
            kind: what is to be tiled.
            count: in so many tiles.
            done: kinds that are left out.
        """
        tiles = self.in_tiles({kind: count})
        if not any(may_be_quicker(region, count) for region, count in tiles if not region.online):
            return kind, count
        for other, heads in self._heads.items():
            if other in done or other == kind or self._holding(other).isdisjoint(self._holding(kind)):
                continue
            key = kind, other, count
            if key not in self._quicker:
                chosen = instead_of_rows(self._graph, tiles, heads, self._compared)
                self._quicker[key] = next((number for region, number in chosen if region.online), None)
            number = self._quicker[key]
            if number is not None:
                return other, number
        return kind, count

    def without_overlapping(self, kind: Kind, tiles: Mapping[Kind, int]) -> dict[Kind, int]:
        """Kinds without those that have operations of another one: a head's rows, and its classes."""
        names = self._holding(kind)
        return {other: count for other, count in tiles.items() if other == kind or not names & self._holding(other)}

    def more_tiles(self, kind: Kind, tiles: int | None, unmet: Unmet, limit: int) -> int:
        """Number of tiles to try next: twice as many, or as many as the bytes that the budget leaves for one need."""
        region = self._of(kind)[0]
        if tiles is None:
            return first_tiles(region)
        times, operation = 2, unmet.bottleneck.operation
        if operation is not None and _loop_of(operation.node) in _loops([region]):
            workspace = operation.workspace
            left = limit - (unmet.minimum - workspace)
            if 0 < left < workspace:
                times = max(times, 2 ** math.ceil(math.log2(workspace / left)))
        return min(times * tiles, region.most_tiles)

    def _of(self, kind: Kind) -> list[TileRegion]:
        rows = by_kind(self._regions.regions)
        return rows[kind] if kind in rows else self._heads[kind]


def _held(needs: Bottleneck, running: Sequence[fx.Node], kinds: Mapping[Kind, Collection[str]]) -> dict[Kind, int]:
    """Bytes that regions hold of what binds, by kind; the kind of the operation that runs there holds some.

    Args:
        running: the operation, and what it reads.
        kinds: names of what the regions of each kind hold; of a name in several, the first holds it.
    """
    kind_of: dict[str, Kind] = {}
    for kind, names in kinds.items():
        for name in names:
            kind_of.setdefault(name, kind)
    held: dict[Kind, int] = {}
    for name, size in needs.live:
        if name in kind_of:
            held[kind_of[name]] = held.get(kind_of[name], 0) + size
    if needs.operation is not None:
        loop = _loop_of(needs.operation.node)
        kinds_held = [kind_of.get(loop or ""), *(kind_of.get(node.name) for node in running)]
        first = next((kind for kind in kinds_held if kind is not None), None)
        if first is not None:
            held[first] = held.get(first, 0) + max(needs.operation.workspace, 1)
    return held


def _loops(regions: Iterable[TileRegion]) -> set[str | None]:
    return {region.widest.name for region in regions}


def _loop_of(node: fx.Node) -> str | None:
    """The name of the widest value in a loop; ``None``: the operation is none."""
    return node.target.widest.name if isinstance(node.target, TileLoop) else None


def names_of(tiles: Tiles) -> frozenset[tuple[str, ...]]:
    """Names that tell tiles from others of the same graph."""
    return frozenset((region.widest.name, *region.online, str(count)) for region, count in tiles)


def by_kind(regions: Iterable[TileRegion]) -> dict[Kind, list[TileRegion]]:
    """Regions that do the same on the same shapes."""
    by_kind: dict[Kind, list[TileRegion]] = {}
    for region in regions:
        targets = tuple(str(node.target) for node in region.members)
        key = tuple(region.widest.meta["val"].shape), region.rows, region.scalar is None, targets
        by_kind.setdefault(key, []).append(region)
    return by_kind


def first_tiles(region: TileRegion) -> int:
    """The number of tiles to begin with: a power of two."""
    tiles, least = 2, _CLASSES if region.online else _ROWS
    while region.rows // (2 * tiles) >= least:
        tiles *= 2
    return min(tiles, region.most_tiles)
