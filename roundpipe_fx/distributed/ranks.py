"""Ranks: processes that agree with each other, and tell each other of failures, over gloo and the store.

Gloo needs no device and no synchronization, so it carries integers, status and texts. What every step exchanges has a
fixed size: objects are pickled, and their sizes travel first, in an operation of their own. A failure goes through the
store, which nobody has to wait at::

    rank 0   gather_record ─────────┬──▶ run ──▶ report("rank 0: …") ──▶ store      (the first report is kept)
    rank 1   gather_record ─────────┤                                      │
    rank 2   gather_record ─────────┴──▶ waits for rank 0 ◀── read_report ─┘

A group numbers its ranks in ascending order, callers in that of the mesh: ``_positions`` converts.

Process groups that a model makes end while the interpreter still runs.
A thread of gloo gives the tensors of an operation back after it has woken those who wait for the operation. For that it
needs the interpreter's lock, and a thread that asks for the lock while the interpreter is finalizing aborts the process
(SIGABRT, pytorch#190489). The destructor of a group waits for its threads. So a model holds no reference to its groups:
``destroy_process_group()`` ends them while the model is still there. Groups of a script that does not call it end when
the interpreter exits, before it is finalized.

A process that was forked ends no group: its threads are the parent's.

If a rank is lost, threads of the others may wait for it until the timeout. Their groups are not ended: exiting must not
wait.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import uuid
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from roundpipe_fx.torch_private import default_store

_MADE: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Those on gloo. Others have no such threads, and may have to be destroyed by all ranks together."""


class OwnGroup:
    """A process group that ends with ``destroy_process_group()``. Constructed by all of its ranks at the same time."""

    def __init__(self, ranks: Sequence[int], timeout: timedelta, backend: str) -> None:
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)
        self._group = weakref.ref(group)
        if backend == "gloo":
            _MADE.add(group)

    def __call__(self) -> dist.ProcessGroup:
        """The group.

        Raises:
            RuntimeError: it was destroyed.
        """
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the process groups of this model were destroyed by destroy_process_group(): call it after the last "
                "step, and compile the model again after another init_process_group()."
            )
        return group


def note_lost_rank() -> None:
    """Operations of the groups made so far may wait for a rank that takes no part in them."""
    _MADE.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=note_lost_rank)


@atexit.register
def _end() -> None:
    # At exit, while the interpreter still runs: the destructor of a group waits for its threads.
    while _MADE and dist.is_initialized():
        dist.destroy_process_group(_MADE.pop())


class Ranks:
    """Some processes. Constructed by all of them at the same time.

    Args:
        timeout: of what they do together.
        name: what they are, for messages.

    Attributes:
        ranks: their global ranks, which messages name.
        size: how many they are.
        rank: this process's number among them.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta, name: str) -> None:
        self.size, self.rank, self.name = len(ranks), list(ranks).index(dist.get_rank()), name
        self.ranks, self._timeout = list(ranks), timeout
        # Process groups sort their ranks; callers use the order of the mesh.
        self._positions = [sorted(ranks).index(rank) for rank in ranks]
        self._host = self._make_group("gloo")
        self._unique = self.share(uuid.uuid4().hex, 0)
        self._store = default_store()
        self._runs = 0

    def _make_group(self, backend: str) -> OwnGroup:
        """A process group of their own."""
        return OwnGroup(self.ranks, self._timeout, backend)

    def group_rank(self, number: int) -> int:
        """A rank's number in the process groups, which order ranks as the default group does."""
        return self._positions[number]

    def gather(self, value: Any) -> list[Any]:
        """A value of every rank, in order of ranks. Every rank must call it."""
        gathered: list[Any] = [None] * self.size
        with _note_if_failed():
            dist.all_gather_object(gathered, value, group=self._host())
        return [gathered[position] for position in self._positions]

    def gather_record(self, record: torch.Tensor) -> torch.Tensor:
        """A one-dimensional tensor of every rank, equally large on all, by rank. Every rank must call it."""
        gathered = record.new_empty(self.size * len(record))
        with _note_if_failed():
            gather_into(gathered, record, self._host()).wait()
        return gathered.view(self.size, -1)[self._positions]

    def maximum(self, record: torch.Tensor) -> None:
        """Overwrite a tensor with the largest elements of all ranks. Every rank must call it."""
        with _note_if_failed():
            dist.all_reduce(record, dist.ReduceOp.MAX, group=self._host())

    def share(self, value: Any, root: int) -> Any:
        """A rank's value, on every rank. Every rank must call it."""
        box = [value]
        with _note_if_failed():
            dist.broadcast_object_list(box, group_src=self.group_rank(root), group=self._host())
        return box[0]

    def next_run(self) -> int:
        """The number of a run that all of them begin now."""
        self._runs += 1
        return self._runs

    def report(self, run: int, text: str) -> None:
        """Tell the other ranks that a run has failed. The first report counts."""
        # compare_set with an empty expectation: the first report is kept, later ones are ignored.
        self._store.compare_set(self._key(run), "", text)

    def read_report(self, run: int) -> str | None:
        """The first report of a run's failure; ``None`` if there is none. It does not wait."""
        key = self._key(run)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _key(self, run: int) -> str:
        return f"roundpipe_fx/{self._unique}/{run}"


def gather_into(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start gathering the parts of all ranks of a group, one-dimensional and equally large, in one tensor."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # deprecated since 2.13
    work: dist.Work = gather(whole, part, group=group, async_op=True)
    return work


@contextlib.contextmanager
def _note_if_failed() -> Iterator[None]:
    """Context manager of an operation that every rank comes to; if it fails, one may not have."""
    try:
        yield
    except BaseException:
        note_lost_rank()
        raise


class RemoteError(RuntimeError):
    """Another rank of the pipeline has failed. The message has its number, and what it raised."""


class RanksDifferError(RuntimeError):
    """The ranks of a pipeline were given different options, batches or code."""
