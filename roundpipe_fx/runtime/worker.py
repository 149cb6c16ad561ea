"""Workers: one thread a device, which issues its actions.

Workers on the CPU divide the cores among them, so that they truly run side by side. Threads end when the workers are
closed, when nobody holds them any more, or with the process.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from roundpipe_fx.runtime.device_streams import DeviceStreams, device_streams_of

__all__ = ["Workers"]

Job = Callable[[int, DeviceStreams], None]

_PATIENCE = 5.0
"""Seconds to wait for a thread to end; it ends after the operation that it is in."""


class Workers:
    """A worker for each of some devices.

    Attributes:
        devices: one for each worker.
        all_device_streams: likewise.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.all_device_streams = tuple(device_streams_of(device) for device in devices)
        self._jobs: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in devices]
        cores = torch.get_num_threads()
        sharing = sum(device.type == "cpu" for device in devices)
        started = threading.Barrier(len(devices) + 1)
        threads = []
        for index, (device_streams, jobs) in enumerate(zip(self.all_device_streams, self._jobs, strict=True)):
            own = max(1, cores // sharing) if device_streams.device.type == "cpu" else None
            # The thread holds nothing of this object, which may so be collected.
            thread = threading.Thread(
                target=_work,
                args=(index, device_streams, jobs, own, started),
                name=f"roundpipe_fx {device_streams.device} worker {index}",
                daemon=True,
            )
            thread.start()
            threads.append(thread)
        started.wait()
        torch.set_num_threads(cores)  # what threads of others start with; each worker has set its own
        self.close = weakref.finalize(self, _stop, self._jobs, threads)

    def submit(self, job: Job) -> None:
        """Have every worker call ``job`` with its number and lane. ``job`` must not raise."""
        if not self.close.alive:
            raise RuntimeError("the workers of this model have been closed.")
        for jobs in self._jobs:
            jobs.put(job)


def _work(
    index: int,
    device_streams: DeviceStreams,
    jobs: queue.SimpleQueue[Job | None],
    threads: int | None,
    started: threading.Barrier,
) -> None:
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        if device_streams.device.type != "cpu":
            torch.accelerator.set_device_index(device_streams.device.index)
    except BaseException:
        started.abort()  # or whoever starts the workers would wait for this one
        raise
    started.wait()
    with torch.no_grad():
        while True:
            job = jobs.get()
            if job is None:
                return
            job(index, device_streams)
            del job  # what it holds must not live until the next one


def _stop(jobs: list[queue.SimpleQueue[Job | None]], threads: list[threading.Thread]) -> None:
    for one in jobs:
        one.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_PATIENCE)  # a thread that still runs when the interpreter goes down takes the process with it
