"""A pipeline's group of processes: who is in it, and the channels between them; and the replicas of the pipeline.

NCCL runs what a pair of ranks exchanges in one communicator in the order in which each rank issues it, sends and
receives alike. So each direction has a communicator of its own: what one rank sends waits only for what it has sent to
the same rank before. Integers, status and texts travel over gloo (:mod:`roundpipe_fx.distributed.ranks`).

With a mesh dimension for data parallelism there are several pipelines, replicas of each other::

                     pp 0    pp 1
    replica 0, dp 0  rank 0  rank 1    a pipeline: values travel along it
    replica 1, dp 1  rank 2  rank 3
                       └──────┴─────── replicas: ranks with the same stages, which average gradients

With one for tensor parallelism a replica has several pipelines, of which each has a part of every layer. They run the
same actions in the same order, and communicate only within stages, by the collectives of the model's own graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from roundpipe_fx.distributed.mesh import DATA, PIPELINE, TENSOR, check_mesh, size_of
from roundpipe_fx.distributed.ranks import OwnGroup, Ranks, gather_into
from roundpipe_fx.torch_private import group_timeout


class Replicas(Ranks):
    """The ranks with the same stages, one of each replica of a pipeline. Arguments as for :class:`Ranks`.

    Args:
        backend: of the group that reduces gradients.
    """

    def __init__(self, ranks: list[int], timeout: timedelta, backend: str) -> None:
        super().__init__(ranks, timeout, "replicas")
        # Tensors on the CPU travel over gloo in any case.
        self._tensors = self._host if backend == "gloo" else self._make_group(backend)
        self._gathers: OwnGroup | None = None
        self._backend = backend

    def prepare_gathers(self) -> None:
        """Make the group of :meth:`start_gather`, which waits for no reduction. Every rank must call it."""
        self._gathers = self._make_group(self._backend)

    def start_gather(self, whole: torch.Tensor, part: torch.Tensor) -> dist.Work:
        """Start gathering the parts of all replicas, one-dimensional and equally large, in one tensor."""
        assert self._gathers is not None
        return gather_into(whole, part, self._gathers())

    def start_sum_of_part(self, part: torch.Tensor, whole: torch.Tensor) -> dist.Work:
        """Start adding a one-dimensional tensor over all replicas, each of which gets its part of the sum."""
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # deprecated since 2.13
        work: dist.Work = reduce(part, whole, group=self._group(whole), async_op=True)
        return work

    def start_sum(self, value: torch.Tensor) -> dist.Work:
        """Start adding a dense tensor over all replicas, in place. Every one must start the same sums in one order."""
        work = dist.all_reduce(value, group=self._group(value), async_op=True)
        assert work is not None
        return work

    def share_tensor(self, value: torch.Tensor) -> None:
        """Overwrite a dense tensor with the first replica's. Every rank must call it."""
        dist.broadcast(value, group_src=self.group_rank(0), group=self._group(value))

    def _group(self, value: torch.Tensor) -> dist.ProcessGroup:
        return self._host() if value.device.type == "cpu" else self._tensors()


class PipelineGroup(Ranks):
    """The processes of a pipeline. Constructed by all of them, and by those of its replicas, at the same time.

    Args:
        mesh: with a dimension ``"pp"`` or ``"dp"``.

    Attributes:
        replica: number of this pipeline's replica.
        replicas: the ranks with the same stages; ``None``: there is one pipeline.
        part: which part of the layers of its stages this rank has; a pipeline sends values between ranks of one part.
        parts: how many there are.
        sharers: the ranks of all parts of this replica, in order of (part, number in the pipeline).
        everyone: all ranks of all pipelines, in order of (replica, part, number in the pipeline).
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        check_mesh(mesh)
        names = mesh.mesh_dim_names or ()
        any_group = mesh.get_group(PIPELINE if PIPELINE in names else DATA)
        timeout, backend = group_timeout(any_group, mesh.device_type), _backend_of(any_group, mesh.device_type)
        ranks = _ranks_of(mesh)
        # This process's coordinates in the mesh: replica, part of the layers, number in the pipeline.
        replica, part, _ = coordinates = next(
            (replica, part, number)
            for replica, replica_ranks in enumerate(ranks)
            for part, part_ranks in enumerate(replica_ranks)
            for number, rank in enumerate(part_ranks)
            if rank == dist.get_rank()
        )
        super().__init__(ranks[replica][part], timeout, "the pipeline")
        self._of_mesh: Callable[[], dist.ProcessGroup | None] = self._host
        if PIPELINE in names:
            self._of_mesh = weakref.ref(mesh.get_group(PIPELINE))
        self.device = torch.device(mesh.device_type)
        if self.device.type != "cpu":
            self.device = torch.device(self.device.type, torch.accelerator.current_device_index())
        # Gloo matches messages of a direction and a tag in order, whatever goes the other way.
        self._up, self._down = (
            (self._host, self._host) if backend == "gloo" else (self._make_group(backend), self._make_group(backend))
        )
        self.replica, self.part, self.parts = replica, part, len(ranks[0])
        self.replicas: Replicas | None = None
        self.sharers: Ranks = self
        if self.parts > 1:
            self.sharers = Ranks(
                [rank for part_ranks in ranks[replica] for rank in part_ranks], timeout, "the pipeline"
            )
        self.everyone = self.sharers
        if len(ranks) > 1:
            self.replicas = Replicas([replica_ranks[part][coordinates[2]] for replica_ranks in ranks], timeout, backend)
            all_ranks = [rank for replica_ranks in ranks for part_ranks in replica_ranks for rank in part_ranks]
            self.everyone = Ranks(all_ranks, timeout, "the pipelines")

    def of_mesh(self) -> dist.ProcessGroup:
        """The mesh's own group of these processes; one for this process alone if it has no ``"pp"``."""
        group = self._of_mesh()
        assert group is not None
        return group

    def share_tensor(self, value: torch.Tensor, root: int) -> None:
        """Overwrite a dense tensor with a rank's. Every rank must call it."""
        group = self._host if value.device.type == "cpu" else self._up
        dist.broadcast(value, group_src=self.group_rank(root), group=group())

    def start_send(self, value: torch.Tensor, target: int, channel: int) -> dist.Work:
        """Start sending a dense tensor, which must not be freed or changed until it was waited for.

        Args:
            target: number of the receiver.
            channel: messages between two ranks arrive in order within a channel.
        """
        work = dist.isend(
            value, group=self._group(self.rank, target, value), tag=channel, group_dst=self.group_rank(target)
        )
        assert work is not None
        return work

    def start_receive(self, value: torch.Tensor, source: int, channel: int) -> dist.Work:
        """Start receiving into a dense tensor: see :meth:`start_send`."""
        work = dist.irecv(
            value, group=self._group(source, self.rank, value), tag=channel, group_src=self.group_rank(source)
        )
        assert work is not None
        return work

    def _group(self, source: int, target: int, value: torch.Tensor) -> dist.ProcessGroup:
        if value.device.type == "cpu":
            return self._host()
        # Towards higher ranks on one communicator, towards lower ones on the other.
        return self._up() if source < target else self._down()


def _backend_of(group: dist.ProcessGroup, device: str) -> str:
    """The backend for tensors of a type of device: a group may have one for each, as ``cpu:gloo,cuda:nccl``."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))[device]


def _ranks_of(mesh: DeviceMesh) -> list[list[list[int]]]:
    """Global ranks by replica, part of the layers, and number in the pipeline."""
    names = mesh.mesh_dim_names or ()
    order = [names.index(name) for name in (DATA, TENSOR, PIPELINE) if name in names]
    others = [dim for dim in range(mesh.ndim) if dim not in order]
    ordered = mesh.mesh.permute(*order, *others)
    rows: list[list[list[int]]] = ordered.reshape(size_of(mesh, DATA), size_of(mesh, TENSOR), -1).tolist()
    return rows
