"""Links between devices of many machines, and rings over them.

Devices are numbered as the ranks of a mesh: neighbours are on one node. A collective runs as a ring, as NCCL does for
large messages: each of ``n`` ranks sends ``n - 1`` parts of an ``n``-th, and each part passes ``n - 1`` hops
(Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). A ring has as many
channels as it has ranks on a node, each of which leaves the node through the network adapter of another device, so
these adapters work in parallel. With 400 GB/s and 3 µs within a node of 8, and 25 GB/s and 10 µs between nodes::

    ranks                            hops of a part         latency    bytes per second to the next rank
    0 … 7                            7 within               21 µs      400 GB/s
    0 … 15                           14 within, 1 between   52 µs      200 GB/s: 8 channels of 25 GB/s
    0, 4, 8, 12: a stride of 4       2 within, 1 between    16 µs      50 GB/s: 2 channels
    0, 8, 16, 24: a stride of 8      3 between              30 µs      25 GB/s: 1 channel

    gather, reduce-scatter           latency + (n - 1)/n · bytes / bandwidth
    all-reduce                       twice that

The collectives of a graph itself, those of tensor parallelism, take their seconds where they are started: a traced
program waits for them right afterwards. So nothing runs beside them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import fx

from roundpipe_fx.ir.collectives import collective_name, group_of
from roundpipe_fx.ir.joint_graph import input_nodes, tensor_values
from roundpipe_fx.torch_private import size_hint


@dataclass(frozen=True)
class Ring:
    """A ring of ranks.

    Attributes:
        ranks: how many.
        latency: seconds that the hops of a part take in all, without its bytes.
        bandwidth: bytes per second that a rank sends to the next one.
    """

    ranks: int
    latency: float
    bandwidth: float

    def gather_seconds(self, size: int) -> float:
        """Seconds until all ranks have a tensor of ``size`` bytes of which each had a part; or the reverse, reduced."""
        if self.ranks == 1 or not size:
            return 0.0
        # ``(n - 1) / n`` of the bytes pass each link.
        return self.latency + (self.ranks - 1) / self.ranks * size / self.bandwidth

    def all_reduce_seconds(self, size: int) -> float:
        """Seconds until all ranks have the sum of their tensors of ``size`` bytes."""
        # A reduce-scatter and a gather, each of which takes as long as the other.
        return 2 * self.gather_seconds(size)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links between devices of one or many nodes, per device and direction.

    Attributes:
        node: how many devices a node has.
        within_bandwidth: bytes per second between devices of a node: NVLink, or PCIe.
        within_latency: seconds of a message between them.
        between_bandwidth: bytes per second between a device and those of other nodes.
        between_latency: seconds of a message between them.
    """

    node: int
    within_bandwidth: float
    within_latency: float
    between_bandwidth: float
    between_latency: float

    def __post_init__(self) -> None:
        """Check the figures.

        Raises:
            ValueError: one of them is impossible; the message names it.
        """
        if isinstance(self.node, bool) or not isinstance(self.node, int) or self.node < 1:
            raise ValueError(f"Network(node={self.node!r}): give the number of devices of a node, at least 1.")
        for name in ("within_bandwidth", "between_bandwidth", "within_latency", "between_latency"):
            value, latency = getattr(self, name), name.endswith("latency")
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and not latency):
                meaning = "seconds, at least 0" if latency else "a positive number of bytes per second"
                raise ValueError(f"Network({name}={value!r}): it has to be {meaning}.")

    def send_seconds(self, size: int, leaves: bool) -> float:
        """Seconds of sending ``size`` bytes to another device.

        Args:
            size: number of bytes.
            leaves: whether that device is of another node.

        Returns:
            the seconds until the last byte has arrived.
        """
        if leaves:
            return self.between_latency + size / self.between_bandwidth
        return self.within_latency + size / self.within_bandwidth

    def leaves(self, device: int, other: int, pipeline: int, replicas: int) -> bool:
        """Return whether in any replica two devices of the pipeline are on different nodes.

        Args:
            device: number in the pipeline.
            other: likewise.
            pipeline: how many devices a pipeline has.
            replicas: how many pipelines there are.

        Returns:
            whether some pipeline sends over the network between them.
        """
        # One replica after another: each occupies `pipeline` devices in a row, and pipelines may lie across nodes.
        firsts = range(0, min(replicas, self.node) * pipeline, pipeline)  # on a node, the next ones lie as these
        return any((first + device) // self.node != (first + other) // self.node for first in firsts)

    def ring(self, ranks: int, stride: int) -> Ring:
        """The ring of the same device of each replica.

        Args:
            ranks: how many replicas there are.
            stride: how many devices a replica has, which is how far the ranks are apart.

        Returns:
            the ring, as fast as the slowest of its links.
        """
        # Ranks of the ring that are `stride` apart lie on one node: 8 devices and stride 2 give 4.
        together = max(1, self.node // stride)
        return self._ring(ranks, -(-ranks // together), together)

    def make_ring(self, ranks: Collection[int]) -> Ring:
        """Make the ring of some devices.

        Args:
            ranks: their numbers.

        Returns:
            the ring, as fast as the slowest of its links.
        """
        # The node with the fewest ranks has the fewest adapters for the ring's channels.
        nodes = Counter(rank // self.node for rank in ranks)
        return self._ring(len(ranks), len(nodes), min(nodes.values()))

    def between_groups(self, size: int) -> Network:
        """The links between groups of neighbours, of which each device talks to the same one of another group.

        Args:
            size: how many devices a group has. All of them talk at the same time, each over its own links.

        Returns:
            the links, with groups for devices.
        """
        return replace(self, node=max(1, self.node // size))

    def _ring(self, ranks: int, nodes: int, together: int) -> Ring:
        """A ring over nodes, with at least ``together`` ranks on each of them."""
        if nodes == 1:
            return Ring(ranks, (ranks - 1) * self.within_latency, self.within_bandwidth)
        # A ring over k nodes leaves a node k - 1 times on the way of a part; all other hops stay inside.
        latency = (nodes - 1) * self.between_latency + (ranks - nodes) * self.within_latency
        bandwidth = self.between_bandwidth * together
        # Channels share the links within a node, so these bound the ring as well.
        return Ring(ranks, latency, min(bandwidth, self.within_bandwidth) if together > 1 else bandwidth)


_NVLINK, _PCIE, _NETWORK = 3.4e-6, 5.7e-6, 9.6e-6
"""Latencies of a hop of a ring, for large messages, by which NCCL chooses algorithms (``src/graph/tuning.cc``)."""


def make_usual_network(link: float, nvlink: bool, between: float) -> Network:
    """Make the links of nodes of eight devices.

    Args:
        link: bytes per second between devices of a node.
        nvlink: whether NVLink connects them, or PCIe.
        between: bytes per second between a device and those of other nodes.
    """
    return Network(
        node=8,
        within_bandwidth=link,
        within_latency=_NVLINK if nvlink else _PCIE,
        between_bandwidth=between,
        between_latency=_NETWORK,
    )


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
    ring = network.make_ring(ranks)
    input_bytes = sum(_bytes_of(source) for source in input_nodes(node))
    if name.startswith("all_reduce"):
        return ring.all_reduce_seconds(input_bytes)
    if name.startswith("all_gather"):
        return ring.gather_seconds(_bytes_of(node))
    if name.startswith("reduce_scatter") or name in ("all_to_all_single", "shard_dim_alltoall"):
        return ring.gather_seconds(input_bytes)
    if name.startswith("broadcast"):
        return ring.latency + input_bytes / ring.bandwidth
    return None


def _bytes_of(node: fx.Node) -> int:
    return sum(size_hint(value.numel() * value.element_size()) for value in tensor_values(node))
