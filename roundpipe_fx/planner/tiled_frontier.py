"""Plans in tiles for the frontier of a plan: more and more tiles, down to the least peak.

It goes the way that planning for ever smaller budgets goes, and emits nothing. Where tiles are taken wherever they pay,
the tiles that the chain of segments finds best are among them.
"""

from __future__ import annotations

import dataclasses
import math

from roundpipe_fx.analysis.tiling import TileRegions
from roundpipe_fx.compiler.operations_in_tiles import (
    add_gradients_to_needs,
    copy_uncut,
    cut_graph,
    read_graph_operations,
    split_means,
    tile_graph,
)
from roundpipe_fx.compiler.planned_values import planned_tiles
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.console.progress import working
from roundpipe_fx.ir.alternative_plans import PlansInTiles
from roundpipe_fx.ir.decisions import tiles_text
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.passes.entry import PassLevel
from roundpipe_fx.planner.evaluation import Space
from roundpipe_fx.planner.segments_in_tiles import tilings_by_segment
from roundpipe_fx.planner.tile_more import lower_peak_by_tiles
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import refine, sample_evenly, search
from roundpipe_fx.remat.choose import Chosen, Unmet, find_bottleneck
from roundpipe_fx.remat.frontier_plans import PlanRecorder
from roundpipe_fx.remat.multi_call_step import search_for_step

_TILINGS = 8
"""So many of the tiles that the chain of segments finds best are looked at, spread over all amounts of memory."""


def make_tiled_frontier(joint: JointGraph, setting: Setting) -> PlansInTiles:
    """The plans on the frontiers of a graph in more and more tiles, the graph as it is among them.

    Args:
        joint: an annotated graph, cut or not; not changed.
        setting: what else there is to know.
    """
    noted = PlanRecorder()
    whole: list[float] = []
    least: list[int] = []
    anywhere = setting.options.tiling == "auto"
    lowest = math.inf

    def planned(graph: JointGraph, setting: Setting, budget: int | float = 0, limit: int | None = None) -> Unmet:
        nonlocal lowest
        staged = setting.run(cut_graph(copy_uncut(graph), setting), PassLevel.STAGED)
        operations = read_graph_operations(staged, setting)
        operations = dataclasses.replace(operations, step=add_gradients_to_needs(setting.step, staged))
        blocks = Blocks(operations)
        result = search(blocks) if operations.step is None else search_for_step(blocks)
        candidates = refine(blocks, result, 0)
        tiles = tiles_text(planned_tiles(staged))
        whole.append(operations.seconds)
        least.append(candidates[-1].peak.bytes)
        for candidate in candidates:
            if anywhere or candidate.peak.bytes < lowest:
                seconds = candidate.seconds + (operations.seconds - whole[0])
                noted.note(operations, candidate, (candidate.peak.bytes, seconds), tiles)
        lowest = min(lowest, candidates[-1].peak.bytes)
        points = tuple((item.peak.bytes, item.seconds) for item in candidates)
        chosen = Chosen(candidate=candidates[-1], limit=0, graph=operations, frontier=points, followed=operations)
        return find_bottleneck(chosen, chosen.candidate.peak.bytes)

    with working("looking for plans in tiles"):
        lower_peak_by_tiles(joint, setting, Space(planned=planned))
        if anywhere:
            graph = split_means(joint, setting)
            tilings = tilings_by_segment(graph, TileRegions(graph).find_wide_regions(0), least[0], setting)
            for _, tiles in sample_evenly([*tilings], _TILINGS):
                planned(tile_graph(graph, tiles, setting) if tiles else joint, setting)
    return PlansInTiles(plans=noted.alternatives(), seconds=whole[0], anywhere=anywhere)
