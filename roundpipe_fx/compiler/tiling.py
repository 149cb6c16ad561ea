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
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx

from roundpipe_fx.analysis.operations import Operation
from roundpipe_fx.analysis.tiling import TileRegion, TileRegions, elements
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.ir.joint_graph import JointGraph, Mark
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.remat.choose import Chosen, refusal
from roundpipe_fx.remat.schedule import simulate
from roundpipe_fx.torch_private import input_sizes

__all__ = ["Needs", "TilingSteps", "UnmetError", "plan_with_tiles", "tile_down", "tile_sequence"]

_ROWS = 128
"""A tile begins with at least so many rows: matrix products with fewer are slower."""
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

Tiles: TypeAlias = Sequence[tuple[TileRegion, int]]
"""Regions with their number of tiles."""
_Kind: TypeAlias = tuple[Any, ...]
"""The same for regions that do the same on the same shapes."""
_TilesOfKinds: TypeAlias = frozenset[tuple[_Kind, int]]
"""Kinds with their number of tiles."""
_InTiles: TypeAlias = tuple[Mapping[_Kind, int], Lowered]
"""Kinds with their number of tiles, and the plan with these."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What binds.

    Attributes:
        bytes: that a step needs at the least.
        operation: while which it needs them; ``None``: it is between operations.
        live: names and bytes of what is alive there.
    """

    bytes: int
    operation: Operation | None
    live: tuple[tuple[str, int], ...]

    @classmethod
    def of_plan(cls, chosen: Chosen, minimum: int) -> Needs:
        """At the peak of a plan.

        Args:
            chosen: the plan.
            minimum: peak of the programs that were emitted for it, in bytes.
        """
        peak = simulate(chosen.followed, chosen.candidate.schedule, list_live=True)
        return cls(bytes=minimum, operation=peak.operation, live=peak.live)


class UnmetError(Exception):
    """No plan stays within the budget.

    Attributes:
        needs: what binds.
        chosen: the plan with the lowest peak; ``None``: one operation alone needs more, and no plan was searched for.
    """

    def __init__(self, needs: Needs, chosen: Chosen | None = None) -> None:
        super().__init__()
        self.needs = needs
        self.chosen = chosen


class _Met(Exception):
    """A plan that stays within the budget is known."""


@dataclass(frozen=True, kw_only=True)
class TilingSteps:
    """How graphs are made and planned.

    Attributes:
        summed: a copy of a graph in which means are sums.
        tiled: a copy of a graph in which regions are loops.
        by_segment: the tiles of regions that the chain of segments finds best for a number of bytes and for ever fewer,
            each with the seconds that a step then takes longer than with nothing recomputed.
        planned: plans for a budget; raises :class:`UnmetError`, without a search for a plan where one operation alone
            needs more than so many bytes as the last argument says.
        share: of a budget that may be used.
    """

    summed: Callable[[JointGraph], JointGraph]
    tiled: Callable[[JointGraph, Tiles], JointGraph]
    by_segment: Callable[[JointGraph, Sequence[TileRegion], int], Iterable[tuple[float, Tiles]]]
    planned: Callable[[JointGraph, int | float, int | None], Lowered]
    share: float


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
    kinds = _Kinds(joint, steps)
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
        except _Met:
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
    kinds = _Kinds(joint, steps)
    with contextlib.suppress(UnmetError):
        try:
            kinds.planned({}, 0, None)
        except UnmetError as error:
            _in_tiles(kinds, error, 0, 0)


def tile_sequence(joint: JointGraph) -> Iterator[list[tuple[TileRegion, int]]]:
    """What is tiled where it is not known what binds: more and more kinds, the widest first, then all in more tiles.

    Args:
        joint: an annotated graph in which means are sums.
    """
    kinds: list[list[TileRegion]] = []
    for regions_so_far in TileRegions(joint).by_width():  # narrower ones only if the wider ones do not suffice
        known, kinds = len(kinds), list(_by_kind(regions_so_far).values())
        first = [_first_tiles(kind[0]) for kind in kinds]
        for count in range(known + 1, len(kinds) + 1):
            yield [(region, tiles) for kind, tiles in zip(kinds[:count], first, strict=False) for region in kind]
    for times in _MORE if kinds else ():
        yield [
            (region, min(times * tiles, region.most_tiles))
            for kind, tiles in zip(kinds, first, strict=True)
            for region in kind
        ]


def _planned(tiling: str | None, budget: int | float, steps: TilingSteps, kinds: _Kinds) -> Lowered:
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


def _shortest(kinds: _Kinds, tiles: Tiles, met: Lowered, share: float) -> Lowered:
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
    for longer, tried in itertools.islice(kinds.by_segment(met.chosen.limit), _TRIED):
        if kinds.seconds + longer >= _ROUGHLY * _seconds(met):
            break
        if _named(tried) != _named(tiles):
            with contextlib.suppress(UnmetError):
                met = min(met, kinds.planned_in(tried, budget), key=_seconds)
    return met


def _named(tiles: Tiles) -> set[tuple[str, int]]:
    return {(region.widest.name, count) for region, count in tiles}


def _seconds(lowered: Lowered) -> float:
    return sum(lowered.seconds.values())


def _in_tiles_either_way(kinds: _Kinds, unmet: UnmetError, budget: int, limit: int) -> _InTiles:
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


def _in_tiles(kinds: _Kinds, unmet: UnmetError, budget: int, limit: int) -> _InTiles:
    """The first plan within the budget, in more and more tiles, with these.

    Args:
        kinds: what can be tiled.
        unmet: what binds without tiles.
        budget: bytes.
        limit: while one operation needs more bytes, no plan is searched for unless that is so in any tiles.

    Raises:
        UnmetError: there is none; of all that was tried the one that needs least.
    """
    tiles: dict[_Kind, int] = {}
    lowest, done = unmet, set[_Kind]()
    while True:
        kind = kinds.binding(lowest.needs, done)
        if kind is None and lowest.chosen is not None:
            raise lowest
        tried = dict(tiles)
        if kind is not None:
            tried[kind] = kinds.more_tiles(kind, tiles.get(kind), lowest.needs, limit)
        try:
            bounded = kind is not None and lowest.chosen is None
            return tried, kinds.planned(tried, budget, limit if bounded else None)
        except UnmetError as error:
            alike = (error.chosen is None) == (lowest.chosen is None)
            if alike and error.needs.bytes > lowest.needs.bytes * _GAIN:
                assert kind is not None
                done.add(kind)
                continue
            if not alike:
                done.clear()  # tiles that do not lower what one operation needs may lower the peak of a plan
            lowest, tiles = error, tried
            done.update(limited for limited, count in tiles.items() if count >= kinds.most_tiles(limited))


class _Kinds:
    """The regions of a graph by kind, found as far as they are asked for, and what is known of plans in tiles.

    Args:
        joint: an annotated graph; not changed.
        steps: how graphs are made and planned.

    Attributes:
        is_met_by_known: whether budgets that a known plan stays within are not planned for, only whether they are met.
    """

    def __init__(self, joint: JointGraph, steps: TilingSteps) -> None:
        self._joint, self._steps = joint, steps
        self.is_met_by_known = False
        self._least: dict[_TilesOfKinds, UnmetError] = {}
        """What one operation needs alone; found where it is more than a limit."""
        self._fitting: dict[_TilesOfKinds, int] = {}
        """The least limit that no operation alone was found to exceed."""
        self._lowest: dict[_TilesOfKinds, UnmetError] = {}
        """The lowest peak of a plan; which that is does not depend on the budget."""

    @functools.cached_property
    def _graph(self) -> JointGraph:
        return self._steps.summed(self._joint)

    @functools.cached_property
    def _regions(self) -> TileRegions:
        return TileRegions(self._graph)

    @functools.cached_property
    def _named(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self._graph.graph.nodes}

    @functools.cached_property
    def seconds(self) -> float:
        """Modelled seconds of the graph without tiles, with nothing recomputed."""
        return sum(node.meta[Mark.SECONDS] for node in self._joint.computed())

    @property
    def exist(self) -> bool:
        """Whether there are any."""
        return bool(self._regions.as_wide_as(0))

    def most_tiles(self, kind: _Kind) -> int:
        """The largest number of tiles that there can be."""
        return self._of(kind)[0].most_tiles

    def planned(self, tiles: Mapping[_Kind, int], budget: int | float, limit: int | None) -> Lowered:
        """A plan for a budget, with kinds in so many tiles.

        Args:
            tiles: by kind; none: the graph as it was.
            budget: bytes or a share.
            limit: where one operation alone needs more bytes, no plan is searched for; ``None``: one always is.

        Raises:
            UnmetError: no plan stays within it. One that is known not to is not searched for again.
            _Met: one does, and only that was asked.
        """
        key = frozenset(tiles.items())
        least, lowest = self._least.get(key), self._lowest.get(key)
        if limit is not None and least is not None and least.needs.bytes > limit:
            raise least
        is_searched = limit is None or least is not None or limit >= self._fitting.get(key, math.inf)
        if lowest is not None and is_searched:
            if budget * self._steps.share < lowest.needs.bytes:
                raise lowest
            if self.is_met_by_known:
                raise _Met
        try:
            return self.planned_in(self.in_tiles(tiles), budget, limit)
        except UnmetError as error:
            if error.chosen is None:
                self._least[key] = error
            else:
                self._lowest[key] = error
                if limit is not None:
                    self._fitting[key] = min(limit, self._fitting.get(key, limit))
            raise

    def in_tiles(self, tiles: Mapping[_Kind, int]) -> Tiles:
        """The regions of kinds, with their number of tiles."""
        return [(region, count) for kind, count in tiles.items() for region in self._of(kind)]

    def planned_in(self, tiles: Tiles, budget: int | float, limit: int | None = None) -> Lowered:
        """A plan for a budget, with regions in so many tiles.

        Args:
            tiles: of regions; none: the graph as it was.
            budget: bytes or a share.
            limit: where one operation alone needs more bytes, no plan is searched for; ``None``: one always is.

        Raises:
            UnmetError: no plan stays within it.
        """
        graph = self._steps.tiled(self._graph, tiles) if tiles else self._joint
        return self._steps.planned(graph, budget, limit)

    def by_segment(self, limit: int) -> Iterable[tuple[float, Tiles]]:
        """The tiles of regions that are best for a number of bytes and for ever fewer, with seconds."""
        return self._steps.by_segment(self._graph, self._regions.as_wide_as(0), limit)

    def binding(self, needs: Needs, done: Collection[_Kind]) -> _Kind | None:
        """The kind that holds most of what binds, but for some; ``None``: none holds any."""
        values = [self._named[name] for name, _ in needs.live if name in self._named]
        running = self._running(needs)
        values += [value for user in running for value in (user, *user.all_input_nodes)]
        # No region has values that are much wider than its widest.
        for width in sorted({elements(value) for value in values} | {0}, reverse=True):
            kinds = _by_kind(self._regions.as_wide_as(width))
            held = _held(needs, running, {kind: regions for kind, regions in kinds.items() if kind not in done})
            if held:
                return max(held, key=held.__getitem__)
        return None

    def _running(self, needs: Needs) -> list[fx.Node]:
        """The operation during which bytes are needed; of a slice that is no longer there, what it was between."""
        if needs.operation is None:
            return []
        node = needs.operation.node
        beside = [node] if node.name in self._named else [*node.all_input_nodes, *node.users]
        return [self._named[operation.name] for operation in beside if operation.name in self._named]

    def more_tiles(self, kind: _Kind, tiles: int | None, needs: Needs, limit: int) -> int:
        """So many tiles as are tried next: twice as many, or what the budget leaves for one is known to need."""
        region = self._of(kind)[0]
        if tiles is None:
            return _first_tiles(region)
        times = 2
        if needs.operation is not None and _loop_of(needs.operation.node) in _loops([region]):
            workspace = needs.operation.workspace
            left = limit - (needs.bytes - workspace)
            if 0 < left < workspace:
                times = max(times, 2 ** math.ceil(math.log2(workspace / left)))
        return min(times * tiles, region.most_tiles)

    def _of(self, kind: _Kind) -> list[TileRegion]:
        return _by_kind(self._regions.found)[kind]


def _held(needs: Needs, running: Sequence[fx.Node], kinds: Mapping[_Kind, Sequence[TileRegion]]) -> dict[_Kind, int]:
    """Bytes that regions hold of what binds, by kind; the kind of the operation that runs there holds some."""
    kind_of = {node.name: kind for kind, regions in kinds.items() for region in regions for node in region.members}
    held: dict[_Kind, int] = {}
    for name, size in needs.live:
        if name in kind_of:
            held[kind_of[name]] = held.get(kind_of[name], 0) + size
    if needs.operation is not None:
        loops = {name: kind for kind, regions in kinds.items() for name in _loops(regions)}
        kinds_held = [loops.get(_loop_of(needs.operation.node)), *(kind_of.get(node.name) for node in running)]
        first = next((kind for kind in kinds_held if kind is not None), None)
        if first is not None:
            held[first] = held.get(first, 0) + max(needs.operation.workspace, 1)
    return held


def _loops(regions: Iterable[TileRegion]) -> set[str | None]:
    return {region.widest.name for region in regions}


def _loop_of(node: fx.Node) -> str | None:
    """The name of the widest value in a loop; ``None``: the operation is none."""
    return node.target.widest.name if isinstance(node.target, TileLoop) else None


def _by_kind(regions: Iterable[TileRegion]) -> dict[_Kind, list[TileRegion]]:
    """Regions that do the same on the same shapes."""
    by_kind: dict[_Kind, list[TileRegion]] = {}
    for region in regions:
        targets = tuple(str(node.target) for node in region.members)
        key = tuple(region.widest.meta["val"].shape), region.rows, region.scalar is None, targets
        by_kind.setdefault(key, []).append(region)
    return by_kind


def _first_tiles(region: TileRegion) -> int:
    """The number of tiles to begin with: a power of two."""
    tiles = 2
    while region.rows // (2 * tiles) >= _ROWS:
        tiles *= 2
    return min(tiles, region.most_tiles)
