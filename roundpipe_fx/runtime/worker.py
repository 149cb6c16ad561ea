"""Workers: one thread per device, which issues its actions.

Workers on the CPU divide the cores among them, so that they run in parallel. Threads end when the workers are closed or
garbage-collected, or with the process. A process that was forked has none of them, and starts its own when it needs
them::

    caller     submit(job) ─┬─▶ job(0, streams of device 0)    in the thread of worker 0
               returns      └─▶ job(1, streams of device 1)    in the thread of worker 1
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from roundpipe_fx.runtime.device_streams import DeviceStreams, device_streams_of
from roundpipe_fx.torch_private import when_forked

Job = Callable[[int, DeviceStreams], None]

_PATIENCE = 5.0
"""Seconds to wait for a thread to end, which it does after its current operation."""


class Workers:
    """One worker per device.

    Args:
        devices: the devices; a device may occur several times.

    Attributes:
        devices: the device of each worker.
        all_device_streams: the streams of each worker.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.all_device_streams = tuple(device_streams_of(device) for device in devices)
        self._start_threads()
        when_forked(self, Workers._forget_threads)

    def _start_threads(self) -> None:
        devices = self.devices
        self._jobs: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in devices]
        # Threads of PyTorch's operators: workers on the CPU share the cores, so each gets an equal part of them.
        cores = torch.get_num_threads()
        sharing = sum(device.type == "cpu" for device in devices)
        started = threading.Barrier(len(devices) + 1)
        threads = []
        for index, (device_streams, jobs) in enumerate(zip(self.all_device_streams, self._jobs, strict=True)):
            threads_here = max(1, cores // sharing) if device_streams.device.type == "cpu" else None
            # The thread holds no reference to this object, so that it can be garbage-collected.
            thread = threading.Thread(
                target=_work,
                args=(index, device_streams, jobs, threads_here, started),
                name=f"roundpipe_fx {device_streams.device} worker {index}",
                daemon=True,
            )
            thread.start()
            threads.append(thread)
        started.wait()
        torch.set_num_threads(cores)  # the default of threads started later; each worker has set its own
        self.close = weakref.finalize(self, _stop, self._jobs, threads)

    def _forget_threads(self) -> None:
        # The threads do not exist in the child, so there is nothing to join; the next submit starts new ones.
        if self.close.alive:
            self.close.detach()
            self._jobs = []
            self.close = weakref.finalize(self, _stop, [], [])

    def submit(self, job: Job) -> None:
        """Make every worker call ``job`` with its index and its streams. ``job`` must not raise."""
        if not self.close.alive:
            raise RuntimeError("the workers of this model have been closed.")
        if len(self._jobs) < len(self.devices):  # this process was forked
            self.close.detach()
            self._start_threads()
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
        device_streams.touch_libraries()
    except BaseException:
        started.abort()  # otherwise the constructor would wait for this thread forever
        raise
    started.wait()
    with torch.no_grad():
        while True:
            job = jobs.get()
            if job is None:
                return
            job(index, device_streams)
            del job  # its references must not live until the next job


def _stop(jobs: list[queue.SimpleQueue[Job | None]], threads: list[threading.Thread]) -> None:
    for worker_jobs in jobs:
        worker_jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_PATIENCE)  # a thread that still runs at interpreter shutdown can crash the process


class Stopped(Exception):
    """Another worker has failed, so this one must not go on."""
