"""Launches: how long operations take together that the host launches one by one, while the device works.

In most stages the device is the slower of the two, and launches are hidden behind its work. With many small kernels the
host is slower, and a stage takes as long as its launches. With launches of 6 µs::

    kernels of a stage       on the device    launches     the stage
    10 of 50 µs              500 µs           60 µs        500 µs
    100 of 2 µs              200 µs           600 µs       600 µs

Views launch nothing. With a stage compiler, operations that are computed in one kernel share its launch. A tile loop
launches its body once a tile.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from roundpipe_fx.analysis.cost.model import CostModel
from roundpipe_fx.analysis.fusion import is_fusible, is_in_kernel
from roundpipe_fx.ir.joint_graph import Mark, input_nodes, viewed
from roundpipe_fx.ir.tile_loop import TileLoop


def seconds_with_launches(nodes: Iterable[fx.Node], costs: CostModel, eager: bool) -> float:
    """Modelled seconds of operations that run one after the other.

    Args:
        nodes: annotated ones of one stage module.
        eager: whether each is a kernel of its own.
    """
    operations = list(nodes)
    seconds = sum(node.meta[Mark.SECONDS] for node in operations)
    if not costs.launch:
        return float(seconds)
    return max(seconds, costs.launch * sum(count_launches(node, eager) for node in operations))


def count_launches(node: fx.Node, eager: bool) -> int:
    """Number of kernels that the host launches for an operation.

    Args:
        eager: whether each operation is a kernel of its own.
    """
    if isinstance(node.target, TileLoop):
        body = node.target.bodies[node.target.size].graph
        computed = [inner for inner in body.nodes if inner.op == "call_function" and Mark.SECONDS in inner.meta]
        return node.target.tiles * sum(count_launches(inner, eager) for inner in computed)
    if not node.meta[Mark.SECONDS]:
        return 0
    fused = not eager and is_in_kernel(node) and any(is_fusible(viewed(source)) for source in input_nodes(node))
    return 0 if fused else 1
