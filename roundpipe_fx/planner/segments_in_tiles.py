"""Copies of a graph with its regions in 1, 2, 4, … tiles, cut at the same points, and the best number for each segment.

Cuts inside a region are dropped, since a loop is one operation. The chain of segments then has the options of all
copies. ::

    segment               0           1           2
    copy with 1 tile      options     options     options
    copy with 2 tiles     options     options     options      the chain picks one option of one copy per segment
    copy with 4 tiles     options     options     options
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from roundpipe_fx.analysis.tiling import TileRegion
from roundpipe_fx.compiler.operations_in_tiles import cut_graph, read_graph_operations, tile_graph
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.passes.entry import PassLevel
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.options_in_tiles import ChainInTiles, join_chains, solve_joined
from roundpipe_fx.remat.options_on_host import HostTier
from roundpipe_fx.remat.segment_chain import chain_of

_Numbers: TypeAlias = tuple[int, ...]
"""By region, the number of tiles; 1: as a whole."""

_PARTS = (2, 4, 8, 16, 32, 64)
"""The widest value of a tile is at most such a part of the budget; what is still less hardly counts."""


@dataclass(frozen=True, kw_only=True)
class _Segments:
    """The segments that all copies have.

    Attributes:
        by_name: of the forward's nodes in the graph without loops.
        by_seq_nr: by autograd's number of the operation.
    """

    count: int
    by_name: Mapping[str, int]
    by_seq_nr: Mapping[int, int]


def tilings_by_segment(
    joint: JointGraph,
    regions: Sequence[TileRegion],
    limit: int,
    setting: Setting,
    tier: HostTier | None = None,
) -> Iterator[tuple[float, list[tuple[TileRegion, int]]]]:
    """Yield tilings that need ever less memory and ever more seconds.

    Args:
        joint: an annotated graph that is not cut, in which means are sums; not changed.
        regions: of this graph; they do not overlap.
        limit: bytes of the budget.
        tier: the host; ``None`` if saved values may not be offloaded.

    Yields:
        seconds beyond those of a step without recomputation, and regions with their number of tiles.
    """
    regions = [region for region in regions if _widest_bytes(region) * _PARTS[-1] >= limit]
    if not regions:
        return
    tried = _enumerate_tile_counts(regions, limit)
    segments = _merge_split_regions(cut_graph(joint.copy(), setting), regions)
    joined = join_chains([_chain_in_tiles(joint, regions, numbers, segments, setting) for numbers in tried])
    of_region = [segments.by_name[region.widest.name] for region in regions]
    for seconds, copies in solve_joined(joined, limit, tier):
        numbers = [tried[copies[segment]][position] for position, segment in enumerate(of_region)]
        yield seconds, [(region, number) for region, number in zip(regions, numbers, strict=True) if number > 1]


def _enumerate_tile_counts(regions: Sequence[TileRegion], limit: int) -> list[_Numbers]:
    """List numbers of tiles for all regions: powers of two from one on, until a tile is negligible in the budget."""
    choices: list[_Numbers] = [(1,) * len(regions)]
    for part in _PARTS:
        # All regions get tiles of about the same bytes, so that one copy of the graph serves all of them.
        most = max(limit // part, 1)
        numbers = tuple(_power_of_two(region, most) for region in regions)
        if numbers != choices[-1]:
            choices.append(numbers)
    return choices


def _power_of_two(region: TileRegion, most: int) -> int:
    """The least power of two with which a tile of the widest value has at most ``most`` bytes, if the region allows
    it."""
    parts = -(-_widest_bytes(region) // most)
    return min(max(1 << (parts - 1).bit_length(), 2), region.most_tiles)


def _widest_bytes(region: TileRegion) -> int:
    value = region.widest.meta["val"]
    return int(value.numel() * value.dtype.itemsize)


def _chain_in_tiles(
    joint: JointGraph,
    regions: Sequence[TileRegion],
    numbers: _Numbers,
    segments: _Segments,
    setting: Setting,
) -> ChainInTiles:
    """Make the chain of a copy of the graph with these numbers of tiles."""
    tiles = [(region, number) for region, number in zip(regions, numbers, strict=True) if number > 1]
    copy = tile_graph(joint, tiles, setting) if tiles else joint.copy()
    tiled_setting = setting.with_decisions(segment_starts=_find_starts(copy, segments), stage_starts=(0,))
    staged = tiled_setting.run(cut_graph(copy, tiled_setting), PassLevel.STAGED)
    chain, _ = chain_of(Blocks(read_graph_operations(staged, setting)))
    return ChainInTiles(chain, tuple(segment.seconds for segment in staged.segments))


def _merge_split_regions(joint: JointGraph, regions: Sequence[TileRegion]) -> _Segments:
    """Merge the segments of a graph that share a region.

    Args:
        joint: a graph with segments.
        regions: of a copy of this graph.
    """
    forward = joint.in_phase(Phase.FORWARD)
    cut_of = {node.name: node.meta[Mark.SEGMENT] for node in forward}
    begins = [True] * len(joint.segments)
    for region in regions:
        # A cut inside a region would fall into its loop. Of a loss head in tiles of the vocabulary, only the operations
        # that it replaces are in this graph; its sums over classes are not.
        covered = [cut_of[node.name] for node in region.in_phase(Phase.FORWARD) if node.name in cut_of]
        begins[min(covered) + 1 : max(covered) + 1] = [False] * (max(covered) - min(covered))
    number = [count - 1 for count in accumulate(begins)]
    return _Segments(
        count=number[-1] + 1,
        by_name={name: number[segment] for name, segment in cut_of.items()},
        by_seq_nr={node.meta["seq_nr"]: number[cut_of[node.name]] for node in forward if "seq_nr" in node.meta},
    )


def _find_starts(copy: JointGraph, segments: _Segments) -> list[int]:
    """Find the positions in the forward of a copy with loops at which all segments but the first begin."""
    segment_numbers: list[int] = []
    for node in copy.in_phase(Phase.FORWARD):
        # A loop inherits `seq_nr` from an operation of its region, which names its segment. Its own name may be that of
        # another operation in the graph without tiles.
        is_known = node.name in segments.by_name and not isinstance(node.target, TileLoop)
        number = segments.by_name[node.name] if is_known else segments.by_seq_nr.get(node.meta.get("seq_nr", -1), 0)
        segment_numbers.append(max(segment_numbers[-1], number) if segment_numbers else number)
    return [bisect_left(segment_numbers, segment) for segment in range(1, segments.count)]
