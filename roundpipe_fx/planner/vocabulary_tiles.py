"""Loss heads in tiles of their classes (the words of a vocabulary), where the loss is a cross entropy.

A tile has the logits of all rows for a few words, instead of those of a few rows for all words. The gradient of the
head's weight is assembled from tiles, in its own precision; with tiles of rows it is a sum over tiles in single
precision, which is read and written once per tile. In return, the backward recomputes the logits, since it cannot begin
before the log-sum-exp of all words is known. Modelled seconds decide which of the two is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from roundpipe_fx.analysis.cost import CostModel
from roundpipe_fx.analysis.tiling import TileRegion, TileRegions, find_online_softmaxes
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, is_tensor, is_view
from roundpipe_fx.passes.online_softmax import log_sum_exp_of, rewrite_online

aten = torch.ops.aten

_ABOUT = 0.5
"""Seconds of sums are compared with those of the logits from this share of them on."""


def find_vocabulary_regions(joint: JointGraph, costs: CostModel) -> list[TileRegion]:
    """The regions of loss heads whose rows are classes; they do not overlap.

    Args:
        joint: an annotated graph in which means are sums; not changed.

    Returns:
        regions whose nodes are those of a copy of the graph, in which log-softmaxes are written with sums over classes.
    """
    softmaxes = find_online_softmaxes(joint)
    if not softmaxes:
        return []
    copy = rewrite_online(joint.copy(), softmaxes, costs)
    regions, heads = TileRegions(copy), []
    log_sum_exps = {name: log_sum_exp_of(copy, name) for name in softmaxes}
    for name, position in softmaxes.items():
        (scores,) = log_sum_exps[name].all_input_nodes
        region = regions.find_around(scores, (position,))
        # Other heads whose log-sum-exp is computed inside this region are written with sums, too.
        if region is not None:
            online = tuple(other for other, log_sum_exp in log_sum_exps.items() if log_sum_exp in region.members)
            heads.append(dataclasses.replace(region, online=online))
    return heads


def replaced_operations(joint: JointGraph, region: TileRegion) -> frozenset[str]:
    """Names of the operations that the loop of a region replaces.

    Args:
        joint: the graph in which means are sums.
        region: of this graph, or of the classes of a loss head; the latter also replaces the operations that are
            rewritten with sums over classes.
    """
    names = {node.name for node in region.members if node not in region.whole}
    if not region.online:
        return frozenset(names)
    # In the copy log-softmaxes are other nodes. What surrounds them, up to nodes that both graphs have, is the
    # region's.
    left = {node.name for node in region.widest.graph.nodes}
    waiting = [node for node in joint.graph.nodes if node.name in region.online]
    while waiting:
        node = waiting.pop()
        names.add(node.name)
        neighbours = (*node.all_input_nodes, *node.users)
        waiting += [other for other in neighbours if other.name not in left and other.name not in names]
    return frozenset(names)


def total_seconds(joint: JointGraph) -> float:
    """Modelled seconds of a graph in which only loops recompute."""
    return sum(node.meta[Mark.SECONDS] for node in joint.computed())


def may_be_quicker(region: TileRegion, tiles: int) -> bool:
    """Test for tiles of classes that may take less time than as many tiles of rows: if the sums of gradients, which
    each tile of rows reads and writes, take about as long as the logits, which tiles of classes compute twice.
    """
    softmax = next((node for node in region.members if node.target is aten._log_softmax.default), None)
    if softmax is None:
        return False
    logits = softmax.meta["val"]
    # The attained bandwidth: the log-softmax reads and writes the logits once.
    bandwidth = 2 * logits.numel() * logits.dtype.itemsize / max(softmax.meta[Mark.SECONDS], 1e-12)
    sums = [
        node.meta["val"].numel() * max(node.meta["val"].dtype.itemsize, 4)
        for node in region.in_phase(Phase.BACKWARD)
        if node not in region.where and node not in region.whole and is_tensor(node) and not is_view(node)
    ]
    # Matrix products of the forward, which tiles of classes compute twice.
    again = sum(node.meta[Mark.SECONDS] for node in region.in_phase(Phase.FORWARD) if node.meta[Mark.FLOPS])
    return tiles * 2 * sum(sums) / bandwidth >= _ABOUT * again


def replace_row_tiles(
    joint: JointGraph,
    tiles: Sequence[tuple[TileRegion, int]],
    heads: Sequence[TileRegion],
    tiled: Callable[[JointGraph, Sequence[tuple[TileRegion, int]]], JointGraph],
) -> list[tuple[TileRegion, int]]:
    """Replace tiles of a loss head's rows by as many tiles of its classes, where these are quicker.

    Args:
        joint: the graph in which means are sums; not changed.
        tiles: regions of this graph, with their number of tiles.
        heads: regions of loss heads whose rows are classes.
        tiled: returns a copy of a graph in which regions are loops.
    """
    chosen = list(tiles)
    for head in heads:
        names = replaced_operations(joint, head)
        # Tiles of rows of the same operations: either these, or tiles of classes.
        rows = [(region, count) for region, count in chosen if not names.isdisjoint(replaced_operations(joint, region))]
        if not any(may_be_quicker(region, count) for region, count in rows):
            continue
        classes = [(head, min(max(count for _, count in rows), head.most_tiles))]
        # Both are written and costed, as the estimate above only says what is worth it.
        if total_seconds(tiled(joint, classes)) < total_seconds(tiled(joint, rows)):
            chosen = [*(choice for choice in chosen if choice not in rows), *classes]
    return chosen
