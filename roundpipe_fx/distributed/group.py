"""A pipeline's group of processes: who is in it, and the channels between them.

NCCL runs what a pair of ranks exchanges in one communicator in the order in which each rank issues it, sends and
receives alike. So each direction has a communicator of its own: what one rank sends waits only for what it has sent to
the same rank before. Integers, status and texts travel over gloo, which needs no device and no synchronization.
"""

from __future__ import annotations

import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from roundpipe_fx.torch_private import default_store, group_timeout

__all__ = ["PIPELINE", "PipelineGroup", "check_mesh"]

PIPELINE = "pp"
"""Name of the mesh dimension over which stages are distributed."""


def check_mesh(mesh: Any) -> None:
    """Check the user's mesh.

    Raises:
        TypeError: it is not a mesh.
        ValueError: it has no dimension ``"pp"``, or others that are larger than 1.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed DeviceMesh, not {type(mesh).__name__}.")
    names = mesh.mesh_dim_names or ()
    if PIPELINE not in names:
        raise ValueError(
            f"mesh has no dimension {PIPELINE!r}, over which stages are distributed; it has {list(names)}: "
            f"init_device_mesh('cpu', (2,), mesh_dim_names=('{PIPELINE}',))."
        )
    others = [name for name in names if name != PIPELINE and mesh[name].size() > 1]
    if others:
        raise ValueError(
            f"mesh has the dimension {others[0]!r}; only {PIPELINE!r} is supported: give mesh[{PIPELINE!r}], and "
            "reduce the gradients over the other dimensions between forward_backward and the optimizer's step."
        )


class PipelineGroup:
    """The processes of a pipeline. Constructed by all of them at the same time.

    Args:
        mesh: with a dimension ``"pp"``.

    Attributes:
        size: number of processes.
        rank: this process's number among them: the number of its device in schedules.
        device: this process's device.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        check_mesh(mesh)
        group = mesh.get_group(PIPELINE)
        ranks = dist.get_process_group_ranks(group)
        self.size, self.rank = len(ranks), mesh.get_local_rank(PIPELINE)
        self.device = torch.device(mesh.device_type)
        if self.device.type != "cpu":
            self.device = torch.device(self.device.type, torch.accelerator.current_device_index())
        timeout = group_timeout(group)

        def another(backend: str) -> dist.ProcessGroup:
            return dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)

        self._host = another("gloo")
        backend = dist.get_backend(group)
        # Gloo matches messages of a direction and a tag in order, whatever goes the other way.
        self._up, self._down = (self._host, self._host) if backend == "gloo" else (another(backend), another(backend))
        self._name = self.share(uuid.uuid4().hex, 0)
        self._store = default_store()

    def gather(self, value: Any) -> list[Any]:
        """A value of every rank, in order of ranks. Every rank must call it."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._host)
        return found

    def share(self, value: Any, root: int) -> Any:
        """A rank's value, on every rank. Every rank must call it."""
        box = [value]
        dist.broadcast_object_list(box, group_src=root, group=self._host)
        return box[0]

    def share_tensor(self, value: torch.Tensor, root: int) -> None:
        """Overwrite a dense tensor with a rank's. Every rank must call it."""
        group = self._host if value.device.type == "cpu" else self._up
        dist.broadcast(value, group_src=root, group=group)

    def start_send(self, value: torch.Tensor, target: int, channel: int) -> dist.Work:
        """Start sending a dense tensor, which must not be freed or changed until it was waited for.

        Args:
            value: it.
            target: number of the receiver.
            channel: messages between two ranks arrive in order within a channel.
        """
        work = dist.isend(value, group=self._group(self.rank, target, value), tag=channel, group_dst=target)
        assert work is not None
        return work

    def start_receive(self, value: torch.Tensor, source: int, channel: int) -> dist.Work:
        """Start receiving into a dense tensor: see :meth:`start_send`."""
        work = dist.irecv(value, group=self._group(source, self.rank, value), tag=channel, group_src=source)
        assert work is not None
        return work

    def _group(self, source: int, target: int, value: torch.Tensor) -> dist.ProcessGroup:
        if value.device.type == "cpu":
            return self._host
        return self._up if source < target else self._down

    def report(self, run: int, text: str) -> None:
        """Tell the other ranks that a run has failed. The first report counts."""
        self._store.compare_set(self._key(run), "", text)

    def reported(self, run: int) -> str | None:
        """The first report of a run's failure; ``None`` if there is none. It does not wait."""
        key = self._key(run)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _key(self, run: int) -> str:
        return f"roundpipe_fx/{self._name}/{run}"
