"""Seconds of the collectives of a graph itself: those of tensor parallelism, over the links between the ranks.

A collective is a ring (:mod:`roundpipe_fx.analysis.cost.network`), and takes its seconds where it is started: a traced
program waits for it right afterwards. So nothing runs beside it.
"""

from __future__ import annotations

from torch import fx

from roundpipe_fx.analysis.cost.network import Network
from roundpipe_fx.ir.collectives import collective_name, group_of
from roundpipe_fx.ir.joint_graph import input_nodes, tensor_values
from roundpipe_fx.torch_private import size_hint

__all__ = ["collective_seconds"]


def collective_seconds(node: fx.Node, network: Network) -> float | None:
    """Seconds of a collective.

    Args:
        node: calls a collective, or waits for one, which takes no time of its own.
        network: the links between all ranks.

    Returns:
        the seconds; ``None``: it is another operator than those that are known, or this process has no such group, as
        for a graph that was written as text.
    """
    name = collective_name(node)
    if name == "wait_tensor":
        return 0.0
    ranks = group_of(node)
    if not ranks:
        return None
    ring = network.ring_of(ranks)
    input_bytes = sum(_bytes(source) for source in input_nodes(node))
    if name.startswith("all_reduce"):
        return ring.all_reduce_seconds(input_bytes)
    if name.startswith("all_gather"):
        return ring.gather_seconds(_bytes(node))
    if name.startswith("reduce_scatter") or name in ("all_to_all_single", "shard_dim_alltoall"):
        return ring.gather_seconds(input_bytes)
    if name.startswith("broadcast"):
        return ring.latency + input_bytes / ring.bandwidth
    return None


def _bytes(node: fx.Node) -> int:
    return sum(size_hint(value.numel() * value.element_size()) for value in tensor_values(node))
