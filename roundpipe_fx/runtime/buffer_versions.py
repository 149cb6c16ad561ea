"""States: tensors that a step updates in place, like the statistics of batch norm.

Each microbatch reads what the one before it has made of them, wherever that ran; the caller's tensors themselves change
when the step is over.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from roundpipe_fx.runtime.mailbox import Stopped
from roundpipe_fx.runtime.pipeline_program import PipelineProgram

__all__ = ["BufferVersions"]


class BufferVersions:
    """The states of one run."""

    def __init__(self, programs: Sequence[PipelineProgram], primals: Sequence[Sequence[Any]]) -> None:
        self._writers: dict[int, list[int]] = {}
        for microbatch, program in enumerate(programs):
            for place in program.mutations.values():
                self._writers.setdefault(id(primals[microbatch][place]), []).append(microbatch)
        self._made: dict[tuple[int, int], Any] = {}
        self._changed = threading.Condition()
        self._stopped = False

    def is_state(self, value: Any) -> bool:
        """Whether some microbatch updates a tensor."""
        return id(value) in self._writers

    def read(self, value: Any, microbatch: int) -> tuple[Any, Any]:
        """What a tensor is for a microbatch, once the microbatches before have updated it, and when it is ready.

        Raises:
            Stopped: the run was stopped.
        """
        before = [writer for writer in self._writers[id(value)] if writer < microbatch]
        if not before:
            return value, None
        key = (id(value), before[-1])
        with self._changed:
            while key not in self._made:
                if self._stopped:
                    raise Stopped
                self._changed.wait()
            return self._made[key]

    def write(self, value: Any, microbatch: int, made: Any, ready: Any) -> None:
        """What a microbatch has made of a tensor, and when it is ready: see :meth:`Lane.ready`."""
        with self._changed:
            self._made[id(value), microbatch] = (made, ready)
            self._changed.notify_all()

    def stop(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
