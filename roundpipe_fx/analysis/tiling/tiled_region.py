"""Tile regions: connected operations around a wide value that can be carried out row by row.

A value is *wide* if it is much larger than what the region reads and returns by rows: the logits of a language model,
the inner width of an MLP, attention scores. From the widest value on, its makers and readers join as long as they work
on each row alone (:mod:`roundpipe_fx.analysis.dimensions`), forward and backward together; the region ends where values
are narrow (:mod:`roundpipe_fx.analysis.tiling.growth`). In an MLP, with x of 96 rows::

    value                         rows in        in the loop
    x[96, 4], dy[96, 4]           dimension 0    read tile by tile
    w1[4, 64], w2[64, 4]          none           read whole by every tile
    h = x·w1, a = tanh(h)         dimension 0    exist for one tile at a time: 64 numbers a row
    y = a·w2                      dimension 0    each tile writes its part
    dw1 = xᵀ·dh, dw2 = aᵀ·dy      none           sums over tiles

In 5 tiles, each has 20 rows and the last one 16. In 96 tiles there would be one row in each, but a product of one row
runs in another kernel, which rounds otherwise: so each tile has 2 rows, and there are 48 tiles.

The rows of a loss head may be its classes (the words of a vocabulary) instead: gradients of its weights are then
assembled from tiles, and every tile reads the same input. For this, the log-softmax is rewritten with sums over classes
in a copy of the graph (:mod:`roundpipe_fx.analysis.tiling.classes_in_tiles`).

Regions of this kind are AutoChunk's (Zhao et al., ICLR 2024) for the forward alone, and what is written by hand in
Arctic Long Sequence Training and Liger's fused loss.
"""

from __future__ import annotations

import dataclasses
import functools
import graphlib
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.tiling.growth import Growth
from roundpipe_fx.analysis.tiling.linear import find_proportional
from roundpipe_fx.analysis.tiling.neighbours import take_in_neighbours
from roundpipe_fx.analysis.tiling.region_kind import (
    ATTENTION,
    NARROW,
    RegionKind,
    is_large,
    kinds_around,
    may_be_widest,
)
from roundpipe_fx.analysis.tiling.rows import Described, Rows, elements, positions_of
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, is_tensor

aten = torch.ops.aten

_MOST_DIMS = 3
"""Largest number of dimensions that make up the rows."""
_MOST_ROUNDED = 2048
"""A sum is rounded once a tile; with more tiles float32 gradients may be farther than 1e-6 from those without."""

_LONG_SUM = 1024
"""A product that sums more terms needs tiles of several rows."""
_ROWS_OF_LONG_SUMS = 16
"""Kernels for products of fewer rows or columns may add long sums term by term, which rounds more than in blocks."""

_PRODUCTS: Mapping[Any, int] = {
    aten.mm.default: 0,
    aten.addmm.default: 1,
    aten.bmm.default: 0,
    aten.baddbmm.default: 1,
    aten.addbmm.default: 1,
    aten.linear.default: 0,
}
"""By matrix product, which of its arguments is the left one."""


@dataclass(frozen=True, kw_only=True)
class TileRegion:
    """Operations that can be carried out tile by tile.

    Attributes:
        widest: the value that the region was found from.
        members: the operations, in graph order.
        whole: those of them that do the same for each tile (scalars).
        where: by value, where its rows, or a multiple of them, are; what has none is the same for each tile, or a sum
            over tiles.
        scalar: the scalar that the whole backward of the region is proportional to, where it waits for nothing else;
            then forward and backward can be one loop. ``None``: they cannot.
        online: names of the log-softmaxes that must be written with sums over their classes, which are the rows.
    """

    widest: fx.Node
    rows: int
    members: tuple[fx.Node, ...]
    where: Mapping[fx.Node, Rows]
    whole: frozenset[fx.Node] = frozenset()
    scalar: fx.Node | None = None
    online: tuple[str, ...] = ()
    kind: RegionKind = NARROW

    def in_phase(self, phase: Phase) -> list[fx.Node]:
        """Members of one phase, in graph order."""
        return [node for node in self.members if node.meta[Mark.PHASE] is phase]

    def multiple(self, value: fx.Node) -> int:
        """Number of positions of a row in a value that has rows."""
        return int(positions_of(value, self.where[value])) // self.rows

    def rows_of_tile(self, tiles: int) -> int:
        """Rows of each tile if there are at most ``tiles``; the last one may have fewer.

        Sums over tiles are rounded once a tile; if they are not of double precision there are at most 2,048 tiles.

        Where rows of a matrix product are divided, no tile has only one: the product would be one with a vector, which
        other kernels compute, that round otherwise. For the same reason no tile has fewer than 16 if the product sums
        more than 1,024 terms.
        """
        size = -(-self.rows // (min(tiles, _MOST_ROUNDED) if self._rounds_sums else tiles))
        # Rounded up until neither the tiles nor the last one have too few rows.
        while size < self.rows and (size < self._least_rows or 0 < self.rows % size < self._least_rows):
            size += 1
        return size

    @property
    def most_tiles(self) -> int:
        """The largest number of tiles that there can be."""
        return -(-self.rows // self.rows_of_tile(self.rows))

    @functools.cached_property
    def _least_rows(self) -> int:
        """The fewest rows that a tile may have: by the matrix products whose rows or columns are divided."""
        products = (node for node in self.members if node.target in _PRODUCTS and node in self.where)
        divided = [node for node in products if self.where[node][-1] >= node.meta["val"].dim() - 2]
        positions = {node: _ROWS_OF_LONG_SUMS if _is_long_sum(node) else 2 for node in divided}
        return max((-(-least // self.multiple(node)) for node, least in positions.items()), default=1)

    @functools.cached_property
    def _rounds_sums(self) -> bool:
        """Return whether sums over tiles have the digits of single precision."""
        sums = (node.meta["val"] for node in self.members if _is_sum(self, node))
        return any(value.is_floating_point() and value.dtype is not torch.float64 for value in sums)

    def copy_to(self, graph: fx.Graph) -> TileRegion:
        """Return the same region in a copy of the graph, whose nodes have the same names."""
        named = {node.name: node for node in graph.nodes}
        return TileRegion(
            widest=named[self.widest.name],
            rows=self.rows,
            members=tuple(named[node.name] for node in self.members),
            where={named[node.name]: rows for node, rows in self.where.items()},
            whole=frozenset(named[node.name] for node in self.whole),
            scalar=None if self.scalar is None else named[self.scalar.name],
            online=self.online,
            kind=self.kind,
        )


class TileRegions:
    """The tile regions of a graph, found lazily.

    Args:
        joint: an annotated graph; not changed.
        kinds: of the regions that are looked for.

    Attributes:
        regions: those found so far.
    """

    def __init__(self, joint: JointGraph, kinds: Sequence[RegionKind] = (NARROW,)) -> None:
        self._joint = joint
        self._order = {node: position for position, node in enumerate(joint.graph.nodes)}
        self._returned = {output for output in joint.outputs if isinstance(output, fx.Node)}
        self._tangential = _find_descendants(joint, joint.tangents)
        self._described: dict[fx.Node, Described | None] = {}
        self._sizes = {node: elements(node) for node in joint.graph.nodes}
        self._taken: set[fx.Node] = set()
        self._seen: set[tuple[fx.Node, RegionKind]] = set()
        self.regions: list[TileRegion] = []
        seeds = [(node, kind) for node in joint.in_phase(Phase.FORWARD) for kind in kinds_around(node) if kind in kinds]
        self._waiting = deque(sorted(seeds, key=lambda seed: (-self._sizes[seed[0]], kinds.index(seed[1]))))

    def find_wide_regions(self, min_elements: int) -> list[TileRegion]:
        """Regions whose widest value has at least a number of elements, the widest first; they do not overlap."""
        # Widest first. Values that a region has taken, or from which a search gave nothing, are not tried again.
        while self._waiting and self._sizes[self._waiting[0][0]] >= min_elements:
            widest, kind = self._waiting.popleft()
            if widest not in self._taken and (widest, kind) not in self._seen:
                self._grow_region(widest, _candidate_rows(widest), kind)
        return self.regions

    def find_around(self, widest: fx.Node, rows: Rows) -> TileRegion | None:
        """Find the region whose rows are in given dimensions of a value.

        Args:
            widest: one of its widest values; the region's is the first of them.
            rows: where that has its rows.

        Returns:
            the region; ``None`` if there is none, if it is small, or if the value belongs to another one.
        """
        count = len(self.regions)
        if widest not in self._taken and is_large(widest):
            self._grow_region(widest, [rows], NARROW)
        if len(self.regions) == count:
            return None
        region, size = self.regions.pop(), self._sizes[widest]
        first = next(node for node in region.members if self._sizes[node] == size and may_be_widest(node))
        self.regions.append(dataclasses.replace(region, widest=first))
        return self.regions[-1]

    def iterate_by_width(self) -> Iterator[list[TileRegion]]:
        """Yield regions with ever narrower widest values: each time all so far, those of one more width last."""
        while self._waiting:
            yield self.find_wide_regions(self._sizes[self._waiting[0][0]])

    def _grow_region(self, widest: fx.Node, starts: Iterable[Rows], kind: RegionKind) -> None:
        grown = self._grow(widest, starts, kind)
        # Activations that are sums over tiles would be rounded otherwise; gradients of weights are in any case.
        best = max(
            (candidate for candidate in grown if candidate.saved > 0),
            key=lambda candidate: (not candidate.sums, candidate.saved),
            default=None,
        )
        # From another value that is as wide, and that was reached, the same would be found.
        reached = {node for candidate in grown for node in candidate.members}
        width = kind.width(widest, self._sizes[widest])
        self._seen.update((node, kind) for node in reached if kind.width(node, self._sizes[node]) == width)
        if best is None:
            return
        regions = [self._region_of(best)]
        if kind.takes_neighbours:
            block = self._region_of(take_in_neighbours(best, self._returned))
            # Forward and backward in one loop are worth more than narrower borders.
            if block.scalar is not None or regions[0].scalar is None:
                regions.insert(0, block)
        region = next((region for region in regions if _is_acyclic(self._joint, [*self.regions, region])), None)
        if region is not None:
            self._taken.update(set(region.members) - region.whole)
            self.regions.append(region)

    def _region_of(self, growth: Growth) -> TileRegion:
        region = TileRegion(
            widest=growth.widest,
            rows=growth.rows,
            members=tuple(sorted(growth.members, key=self._order.__getitem__)),
            where=dict(growth.where),
            whole=frozenset(growth.whole),
            kind=growth.kind,
        )
        return dataclasses.replace(region, scalar=_find_scalar(self._joint, region, self._tangential))

    def _grow(self, widest: fx.Node, starts: Iterable[Rows], kind: RegionKind) -> list[Growth]:
        """Grow regions from a value, with all of its rows and with as few as operations may need that were refused."""
        grown: dict[tuple[Rows, int], Growth] = {}
        for rows in starts:
            waiting = [int(positions_of(widest, rows))]
            while waiting:
                count = waiting.pop()
                start = _fewest_dimensions(widest, rows, count)
                if (start, count) in grown:
                    continue
                grown[start, count] = candidate = Growth(
                    widest=widest,
                    start=start,
                    rows=count,
                    kind=kind,
                    order=self._order,
                    described=self._described,
                    sizes=self._sizes,
                    taken=self._taken,
                    tangential=self._tangential,
                )
                candidate.grow(self._returned)
                waiting += candidate.coarser if kind is ATTENTION else ()
        return list(grown.values())


def _fewest_dimensions(value: fx.Node, rows: Rows, count: int) -> Rows:
    """The first of some dimensions whose product is a multiple of a number of rows."""
    return next(rows[:n] for n in range(1, len(rows) + 1) if positions_of(value, rows[:n]) % count == 0)


def _is_acyclic(joint: JointGraph, regions: Sequence[TileRegion]) -> bool:
    """Return whether the loops that stand for regions can run one after another, each as a whole."""
    loops: dict[fx.Node, Any] = {}
    # Each region becomes one node (forward and backward together if it has a scalar): the graph has to stay without
    # circles.
    for position, region in enumerate(regions):
        for node in set(region.members) - region.whole:
            loops[node] = position, None if region.scalar is not None else node.meta[Mark.PHASE]
    sorter: graphlib.TopologicalSorter[Any] = graphlib.TopologicalSorter()
    for node in joint.graph.nodes:
        head = loops.get(node, node)
        sorter.add(head, *(other for source in node.all_input_nodes if (other := loops.get(source, source)) != head))
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return False
    return True


def _find_scalar(joint: JointGraph, region: TileRegion, tangential: Collection[fx.Node]) -> fx.Node | None:
    """Find the one scalar incoming gradient that a region's backward is proportional to."""
    forward, backward = region.in_phase(Phase.FORWARD), region.in_phase(Phase.BACKWARD)
    inside = set(region.members)
    outside = {source for node in backward for source in node.all_input_nodes if source not in inside}
    # The backward of such a region waits for one scalar from outside, the loss's gradient. As the backward is linear in
    # it, the loop can run with 1 and be scaled afterwards.
    waiting = [node for node in outside if node in tangential]
    if len(waiting) != 1 or waiting[0] in region.where or elements(waiting[0]) != 1:
        return None
    # A gradient that is made before its scale is known must not underflow.
    values = [node.meta["val"] for node in region.members if is_tensor(node)]
    if any(value.dtype is torch.float16 for value in values):
        return None
    # The forward must not depend on what the backward reads from outside, and no sum over tiles may be read before it
    # is complete.
    later = _find_descendants(joint, forward)
    if any(node in later for node in outside) or any(
        _is_sum(region, source) for source in _find_sources_among(backward, forward)
    ):
        return None
    linear = find_proportional(backward, waiting)
    results = [node for node in backward if node not in region.whole and any(user not in inside for user in node.users)]
    return waiting[0] if linear is not None and results and all(node in linear for node in results) else None


def _is_long_sum(product: fx.Node) -> bool:
    """Return whether a matrix product, not of double precision, sums more terms than any kernel may add one by one."""
    left = product.args[_PRODUCTS[product.target]]
    assert isinstance(left, fx.Node)
    terms = left.meta["val"].shape[-1]
    return left.meta["val"].dtype is not torch.float64 and (not isinstance(terms, int) or terms > _LONG_SUM)


def _is_sum(region: TileRegion, node: fx.Node) -> bool:
    return node not in region.where and node not in region.whole and is_tensor(node)


def _find_sources_among(nodes: Iterable[fx.Node], candidates: Iterable[fx.Node]) -> set[fx.Node]:
    return {source for node in nodes for source in node.all_input_nodes} & set(candidates)


def _find_descendants(joint: JointGraph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Find everything that depends on some nodes."""
    # One pass in graph order suffices, since sources come first.
    origins = set(nodes)
    descendants: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op != "output" and any(source in origins or source in descendants for source in node.all_input_nodes):
            descendants.add(node)
    return descendants | {node for node in origins if node.op == "placeholder"}


def _candidate_rows(node: fx.Node) -> Iterator[Rows]:
    """Where the rows of a value may be."""
    shape = node.meta["val"].shape
    for count in range(1, _MOST_DIMS + 1):
        # Adjacent dimensions only: rows in dimensions 0 and 1 of (batch, tokens, width) are one range of memory.
        for first in range(len(shape) - count + 1):
            if math.prod(shape[first : first + count]) > 1:
                yield tuple(range(first, first + count))
