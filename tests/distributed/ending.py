"""Run by a test: a rank ends, once in each of several ways, and says whose threads are left.

Those of a model's groups must end before the interpreter is finalized: one that asks for its lock then aborts it.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class Ends:
    """How this process ends, and how many threads it has without those of a model; not at all in the first process."""

    way: str | None = None
    threads = 0


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _only_of_script() -> bool:
    """Whether no others are left. The system lists one for a moment after it has ended."""
    for _ in range(200):
        if _threads() <= Ends.threads:
            return True
        time.sleep(0.01)
    return False


def _say() -> None:
    if Ends.way is not None:
        print(Ends.way, "of the script" if _only_of_script() else "of a model")


def _run(way: str, make: Any) -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Ends.way, Ends.threads = way, _threads()
    group = make(DeviceMesh("cpu", [0], mesh_dim_names=("pp",)))
    assert group.gather(way) == [way] and _threads() > Ends.threads
    group.share_tensor(torch.ones(4), 0)
    if way == "destroys":
        dist.destroy_process_group()
        assert _only_of_script()  # which the mesh may keep
        try:
            group.gather(way)
        except RuntimeError as error:
            print(error)
    if way == "raises":
        raise ValueError("as it should")
    if way == "exits":
        sys.exit(3)
    return group


def _main() -> Any:
    atexit.register(_say)  # handlers run in reverse order: this one after the package's
    from roundpipe_fx.distributed.group import PipelineGroup

    for way in ("destroys", "ends", "raises", "exits"):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            return _run(way, PipelineGroup)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status))
    return None


if __name__ == "__main__":
    HELD = _main()
