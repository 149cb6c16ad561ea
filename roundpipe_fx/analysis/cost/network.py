"""Links between devices of many machines, and rings over them.

Devices are numbered as the ranks of a mesh: neighbours are on one node. A collective runs as a ring, as NCCL does for
large messages: each of ``n`` ranks sends ``n - 1`` parts of an ``n``-th, and each part passes ``n - 1`` hops
(Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). A ring has as many
channels as it has ranks on a node, each of which leaves the node through the network adapter of another device, so
these adapters work in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from roundpipe_fx.analysis.cost.roofline import DEVICES

__all__ = ["Network", "Ring", "network_of"]


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
        return self.latency + (self.ranks - 1) / self.ranks * size / self.bandwidth

    def all_reduce_seconds(self, size: int) -> float:
        """Seconds until all ranks have the sum of their tensors of ``size`` bytes."""
        return 2 * self.gather_seconds(size)


@dataclass(frozen=True, kw_only=True)
class Network:
    """How devices of one or many nodes are connected, per device and direction.

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
        """Whether in any replica two devices of the pipeline are on different nodes.

        Args:
            device: number in the pipeline.
            other: likewise.
            pipeline: how many devices a pipeline has.
            replicas: how many pipelines there are.

        Returns:
            whether some pipeline sends over the network between them.
        """
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
        together = max(1, self.node // stride)
        nodes = -(-ranks // together)
        if nodes == 1:
            return Ring(ranks, (ranks - 1) * self.within_latency, self.within_bandwidth)
        latency = (nodes - 1) * self.between_latency + (ranks - nodes) * self.within_latency
        bandwidth = self.between_bandwidth * together
        return Ring(ranks, latency, min(bandwidth, self.within_bandwidth) if together > 1 else bandwidth)


_NVLINK, _PCIE, _NETWORK = 3.4e-6, 5.7e-6, 9.6e-6
"""Latencies of a hop of a ring, for large messages, by which NCCL chooses algorithms (``src/graph/tuning.cc``)."""


def _network(name: str, latency: float, between: float) -> Network:
    return Network(
        node=8,
        within_bandwidth=DEVICES[name].link,
        within_latency=latency,
        between_bandwidth=between,
        between_latency=_NETWORK,
    )


# Eight devices a node. DGX A100 and DGX H100 or H200 have a network adapter for each device, of 200 and 400 Gb/s
# (NVIDIA's data sheets); where devices have no NVLink, one of 100 Gb/s that eight share is assumed.
_NETWORKS: Mapping[str, Network] = {
    "A100": _network("A100", _NVLINK, 25e9),
    "H100": _network("H100", _NVLINK, 50e9),
    "H200": _network("H200", _NVLINK, 50e9),
    "L40S": _network("L40S", _PCIE, 12.5e9 / 8),
    "RTX 3090": _network("RTX 3090", _PCIE, 12.5e9 / 8),
    "RTX 4090": _network("RTX 4090", _PCIE, 12.5e9 / 8),
    "cpu": _network("cpu", _PCIE, 12.5e9 / 8),
}


def network_of(name: str) -> Network:
    """The usual network of devices.

    Args:
        name: of a device in :data:`roundpipe_fx.analysis.cost.DEVICES`.
    """
    return _NETWORKS[name]
