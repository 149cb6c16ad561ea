"""Loss heads in tiles of their classes: the words of a vocabulary, where the loss is a cross entropy.

Beside tiles of rows, the logits of all rows exist for a few words at a time. The gradient of the head's weight is put
together of tiles, in its own precision; with tiles of rows it is their sum, in single precision, and is read and
written once a tile. What it costs: the backward makes the logits again, as it cannot begin before the log-sum-exp of
all words is known. So tiles of words are quicker where rows are many, and tiles of rows where they are few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from roundpipe_fx.analysis.cost import CostModel
from roundpipe_fx.analysis.tiling import TileRegion, TileRegions, online_softmaxes
from roundpipe_fx.ir.joint_graph import JointGraph, Mark
from roundpipe_fx.passes.online_softmax import log_sum_exp_of, scores_of, write_online

__all__ = ["class_regions", "instead_of_rows", "operations_of", "seconds_of"]


def class_regions(joint: JointGraph, costs: CostModel) -> list[TileRegion]:
    """The regions of loss heads whose rows are classes; they do not overlap.

    Args:
        joint: an annotated graph in which means are sums; not changed.
        costs: of operations.

    Returns:
        regions with nodes of copies of the graph in which their log-softmax is written with sums over classes.
    """
    names = online_softmaxes(joint)
    if not names:
        return []
    copy = write_online(joint.copy(), names, costs)
    regions, heads = TileRegions(copy), []
    log_sum_exps = {name: log_sum_exp_of(copy, name) for name in names}
    for name in names:
        scores, place = scores_of(log_sum_exps[name])
        region = regions.around(scores, (place,))
        if region is not None:
            online = tuple(other for other, made in log_sum_exps.items() if made in region.members)
            heads.append(dataclasses.replace(region, online=online))
    return heads


def operations_of(joint: JointGraph, region: TileRegion) -> frozenset[str]:
    """Names of the operations that a loop stands for.

    Args:
        joint: the graph in which means are sums.
        region: of this graph, or of a loss head's classes: then those are among them that sums over classes replace.
    """
    names = {node.name for node in region.members if node not in region.whole}
    if not region.online:
        return frozenset(names)
    left = {node.name for node in region.widest.graph.nodes}
    waiting = [node for node in joint.graph.nodes if node.name in region.online]
    while waiting:
        node = waiting.pop()
        names.add(node.name)
        beside = (*node.all_input_nodes, *node.users)
        waiting += [other for other in beside if other.name not in left and other.name not in names]
    return frozenset(names)


def seconds_of(joint: JointGraph) -> float:
    """Modelled seconds of a graph, with nothing recomputed but what loops recompute."""
    return sum(node.meta[Mark.SECONDS] for node in joint.computed())


def instead_of_rows(
    joint: JointGraph,
    tiles: Sequence[tuple[TileRegion, int]],
    heads: Sequence[TileRegion],
    tiled: Callable[[JointGraph, Sequence[tuple[TileRegion, int]]], JointGraph],
) -> list[tuple[TileRegion, int]]:
    """Tiles with those of classes in place of as many tiles of a loss head's rows, where they are quicker.

    Args:
        joint: the graph in which means are sums; not changed.
        tiles: regions of this graph, with their number of tiles.
        heads: of loss heads, whose rows are classes.
        tiled: a copy of a graph in which regions are loops.
    """
    chosen = list(tiles)
    for head in heads:
        names = operations_of(joint, head)
        rows = [(region, count) for region, count in chosen if not names.isdisjoint(operations_of(joint, region))]
        if not rows:
            continue
        classes = [(head, min(max(count for _, count in rows), head.most_tiles))]
        if seconds_of(tiled(joint, classes)) < seconds_of(tiled(joint, rows)):
            chosen = [*(one for one in chosen if one not in rows), *classes]
    return chosen
