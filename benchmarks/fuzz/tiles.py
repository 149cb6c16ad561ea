"""Tiles in all that can be divided, whether a plan needs them or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from roundpipe_fx.analysis.tiling import KINDS, TileRegions
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.passes.entry import Pass, PassContext
from roundpipe_fx.passes.mean_losses import split_mean_losses
from roundpipe_fx.passes.online_softmax import rewrite_online
from roundpipe_fx.passes.pipeline import body_costs
from roundpipe_fx.passes.tiles import tile_regions
from roundpipe_fx.planner.vocabulary_tiles import find_vocabulary_regions, replaced_operations

__all__ = ["tiled_passes"]


def tiled_passes(tiles: int, by_class: bool = False) -> Callable[[list[Pass]], Sequence[Pass]]:
    """For the option ``passes``: every region of every graph is carried out in so many tiles.

    Args:
        tiles: at most.
        by_class: whether loss heads have tiles of their classes, where they can have such.
    """

    def run(joint: JointGraph, context: PassContext) -> JointGraph:
        joint = split_mean_losses(joint, context.costs, context.device)
        costs = body_costs(context)
        heads = find_vocabulary_regions(joint, context.costs) if by_class else []
        replaced = frozenset().union(*(replaced_operations(joint, head) for head in heads))
        regions = TileRegions(joint, KINDS).find_wide_regions(0)
        others = [region for region in regions if replaced.isdisjoint(replaced_operations(joint, region))]
        joint = rewrite_online(joint, {name for head in heads for name in head.online}, context.costs, context.device)
        return tile_regions(joint, [(region, min(tiles, region.rows)) for region in (*others, *heads)], costs)

    def passes(given: list[Pass]) -> list[Pass]:
        place = next(number for number, one in enumerate(given) if one.name == "unread_outputs")
        forced = Pass("forced_tiles", run, when=lambda context: context.training, needs=("annotate",))
        return [*given[:place], forced, *given[place:]]

    return passes
