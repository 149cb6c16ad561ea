"""Buffer versions: buffers that a step updates in place, such as the running statistics of batch norm.

Each microbatch reads the version that the previous one has written, on whatever device that ran. The caller's tensors
themselves are updated when the step is over. With a buffer ``mean`` that each of three microbatches updates::

    read by microbatch 0    the caller's tensor, at once
    written by 0            version 0, with the event after which it may be read
    read by 1               waits in the worker's thread for version 0; then the compute stream waits for its event
    written by 1            version 1
    read by 2               waits for version 1
    end of the step         the caller's tensor gets version 2
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from roundpipe_fx.runtime.pipeline_program import PipelineProgram
from roundpipe_fx.runtime.worker import Stopped


class BufferVersions:
    """The buffer versions of one run.

    Args:
        programs: the program of each microbatch.
        primals: for each microbatch, the inputs of the forward.
    """

    def __init__(self, programs: Sequence[PipelineProgram], primals: Sequence[Sequence[Any]]) -> None:
        self._writers: dict[int, list[int]] = {}
        for microbatch, program in enumerate(programs):
            for position in program.mutations.values():
                self._writers.setdefault(id(primals[microbatch][position]), []).append(microbatch)
        self._versions: dict[tuple[int, int], Any] = {}
        self._changed = threading.Condition()
        self._stopped = False

    def is_state(self, value: Any) -> bool:
        """Return whether any microbatch updates a tensor."""
        return id(value) in self._writers

    def read(self, value: Any, microbatch: int) -> tuple[Any, Any]:
        """The version of a tensor that a microbatch reads; waits until the previous microbatches have updated it.

        Args:
            microbatch: index of the microbatch.

        Returns:
            the version, and the event after which it may be read (see :meth:`DeviceStreams.ready`).

        Raises:
            Stopped: the run was stopped.
        """
        before = [writer for writer in self._writers[id(value)] if writer < microbatch]
        if not before:
            return value, None
        key = (id(value), before[-1])
        with self._changed:
            while key not in self._versions:
                if self._stopped:
                    raise Stopped
                self._changed.wait()
            return self._versions[key]

    def write(self, value: Any, microbatch: int, new_value: Any, ready: Any) -> None:
        """Publish a microbatch's version of a tensor.

        Args:
            microbatch: index of the microbatch.
            ready: the event after which it may be read (see :meth:`DeviceStreams.ready`).
        """
        with self._changed:
            self._versions[id(value), microbatch] = (new_value, ready)
            self._changed.notify_all()

    def stop(self) -> None:
        """Make every reader that waits, now or later, raise :class:`Stopped`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
