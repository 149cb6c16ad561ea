"""Own groups: the process groups that a model makes, which end while the interpreter still runs.

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
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

__all__ = ["OwnGroup", "note_lost_rank"]

_MADE: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Those on gloo. Others have no such threads, and may have to be destroyed by all ranks together."""


class OwnGroup:
    """A process group that ends with ``destroy_process_group()``. Constructed by all of its ranks at the same time.

    Args:
        ranks: their global ranks.
        timeout: of its operations.
        backend: that runs them.
    """

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
    while _MADE and dist.is_initialized():
        dist.destroy_process_group(_MADE.pop())
