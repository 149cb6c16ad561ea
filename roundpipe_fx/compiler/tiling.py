"""What is tiled: regions at whose work the peak is, one kind after another, until the budget is met.

Plans are made without tiles first. If the budget cannot be met, the regions that hold most at the lowest peak that was
found are tiled, all of the same kind alike, and a plan is made anew; then the next kind, or the same in more tiles. The
way does not depend on the budget, so the least budget that is named at its end can be met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from roundpipe_fx.analysis.tiling import TileRegion, find_tile_regions
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.remat.choose import Chosen, refusal
from roundpipe_fx.remat.schedule import simulate
from roundpipe_fx.torch_private import input_sizes

__all__ = ["TilingSteps", "UnmetError", "plan_with_tiles", "tile_sequence"]

_ROWS = 128
"""A tile begins with at least so many rows: matrix products with fewer are slower."""
_MORE = (2, 4, 8)
"""Where it is not known what binds, so many times as many tiles as first are tried."""
_GAIN = 0.999
"""More tiles are worth it if they lower the peak to this share at most."""


class UnmetError(Exception):
    """No plan stays within the budget.

    Attributes:
        chosen: the plan with the lowest peak.
        minimum: peak of the programs that were emitted for it, in bytes.
    """

    def __init__(self, chosen: Chosen, minimum: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.minimum = minimum


@dataclass(frozen=True, kw_only=True)
class TilingSteps:
    """How graphs are made and planned.

    Attributes:
        summed: a copy of a graph in which means are sums.
        tiled: a copy of a graph in which regions are loops.
        planned: plans for a budget; raises :class:`UnmetError`.
    """

    summed: Callable[[JointGraph], JointGraph]
    tiled: Callable[[JointGraph, Sequence[tuple[TileRegion, int]]], JointGraph]
    planned: Callable[[JointGraph, int | float], Lowered]


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
    best, unmet, limit = None, None, budget
    try:
        best = steps.planned(joint, budget)
    except UnmetError as error:
        unmet = error
    chosen = unmet.chosen if unmet is not None else None
    if best is not None:
        if tiling != "auto" or not isinstance(best.chosen, Chosen) or not best.recompute_seconds:
            return best
        chosen, limit = best.chosen, best.chosen.limit
    if tiling == "never":
        assert unmet is not None
        raise refusal(unmet.chosen, unmet.minimum, budget)
    graph = steps.summed(joint)
    kinds = _kinds(find_tile_regions(graph))
    tiles: dict[int, int] = {}
    lowest, done = unmet, set[int]()
    while chosen is not None:
        kind = _binding(chosen, [kinds[place] if place not in done else [] for place in range(len(kinds))])
        if kind is None:
            break
        before = dict(tiles)
        tiles[kind] = 2 * tiles[kind] if kind in tiles else _first_tiles(kinds[kind][0])
        asked = [(region, count) for place, count in tiles.items() for region in kinds[place]]
        try:
            found = steps.planned(steps.tiled(graph, asked), limit)
        except UnmetError as error:
            if lowest is not None and error.minimum > lowest.minimum * _GAIN:
                tiles = before
                done.add(kind)
                continue
            lowest, chosen = error, error.chosen
            if tiles[kind] >= kinds[kind][0].rows:
                done.add(kind)
            continue
        if best is None or _seconds(found) < _seconds(best):
            best = found
        break
    if best is None:
        assert lowest is not None
        refused = refusal(lowest.chosen, lowest.minimum, budget)
        refused.wants_sizes = bool(input_sizes(joint.module))
        raise refused
    return best


def tile_sequence(joint: JointGraph) -> Iterator[list[tuple[TileRegion, int]]]:
    """What is tiled where it is not known what binds: more and more kinds, the widest first, then all in more tiles.

    Args:
        joint: an annotated graph in which means are sums.
    """
    kinds = _kinds(find_tile_regions(joint))
    first = [_first_tiles(kind[0]) for kind in kinds]
    for count in range(1, len(kinds) + 1):
        yield [(region, tiles) for kind, tiles in zip(kinds[:count], first, strict=False) for region in kind]
    for times in _MORE if kinds else ():
        yield [
            (region, min(times * tiles, region.rows))
            for kind, tiles in zip(kinds, first, strict=True)
            for region in kind
        ]


def _seconds(lowered: Lowered) -> float:
    return sum(lowered.seconds.values())


def _kinds(regions: Sequence[TileRegion]) -> list[list[TileRegion]]:
    """Regions that do the same on the same shapes."""
    found: dict[Any, list[TileRegion]] = {}
    for region in regions:
        targets = tuple(str(node.target) for node in region.members)
        key = tuple(region.widest.meta["val"].shape), region.rows, region.scalar is None, targets
        found.setdefault(key, []).append(region)
    return list(found.values())


def _first_tiles(region: TileRegion) -> int:
    """The number of tiles to begin with: a power of two."""
    tiles = 2
    while region.rows // (2 * tiles) >= _ROWS:
        tiles *= 2
    return min(tiles, region.rows)


def _binding(chosen: Chosen, kinds: Sequence[Sequence[TileRegion]]) -> int | None:
    """The kind of regions that holds most at the peak of a plan."""
    peak = simulate(chosen.followed, chosen.candidate.schedule, list_live=True)
    held: dict[int, int] = {}
    kind_of = {node.name: place for place, kind in enumerate(kinds) for region in kind for node in region.members}
    loops = {region.widest.name: place for place, kind in enumerate(kinds) for region in kind}
    for name, size in peak.live:
        if name in kind_of:
            held[kind_of[name]] = held.get(kind_of[name], 0) + size
    if peak.operation is not None:
        node, workspace = peak.operation.node, peak.operation.workspace
        place = loops.get(node.target.widest.name) if isinstance(node.target, TileLoop) else kind_of.get(node.name)
        if place is not None:
            held[place] = held.get(place, 0) + max(workspace, 1)
    return max(held, key=held.__getitem__, default=None)
