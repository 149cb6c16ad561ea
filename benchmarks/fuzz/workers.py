"""Processes that run cases: one that hangs or dies is replaced, and says what it was at."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

__all__ = ["run_all"]

_CASES_A_PROCESS = 60
"""Then a new one: what compilers keep adds up."""
_BESIDE_OTHERS = 10
"""How many times slower a process may be on a machine that does other things as well."""


def _work(connection: Any, task: Callable[[Any, Callable[[str], None]], Any]) -> None:
    import torch

    torch.set_num_threads(1)
    # The profiler and compilers write to the file descriptor.
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        if item is None:
            return
        connection.send(("done", task(item, lambda text: connection.send(("at", text)))))


class _Worker:
    def __init__(self, task: Callable[..., Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, task), daemon=True)
        self.process.start()
        theirs.close()
        self.item: Any = None
        self.ran = 0
        self.hear("starting")

    def begin(self, item: Any) -> None:
        self.item = item
        self.ran += 1
        self.hear("starting")
        self.connection.send(item)

    def hear(self, at: str) -> None:
        """It has said what it is at."""
        self.at, self._since, self._spent = at, time.monotonic(), self._seconds()

    def _seconds(self) -> float:
        """Seconds of processors' time so far."""
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return times.user + times.system

    def hangs(self, patience: float) -> bool:
        """Whether it has computed for so many seconds without a word, or for many times as long has not come to it."""
        if self._seconds() - self._spent > patience:
            return True
        return time.monotonic() - self._since > _BESIDE_OTHERS * patience

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.close()
        self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()


def run_all(
    items: Iterator[Any], task: Callable[[Any, Callable[[str], None]], Any], jobs: int, patience: float
) -> Iterator[tuple[Any, Any, str]]:
    """(item, result, "") of each item as it is done; (item, ``None``, what it was at) of one that hung or died.

    Args:
        items: what to run; taken as workers are free.
        task: ``(item, say) -> result``, importable by name.
        jobs: how many processes.
        patience: seconds of a processor's time without a word from a worker.
    """
    idle: list[_Worker] = []
    busy: list[_Worker] = []
    try:
        while True:
            while len(busy) < jobs:
                item = next(items, None)
                if item is None:
                    break
                worker = idle.pop() if idle else _Worker(task)
                worker.begin(item)
                busy.append(worker)
            if not busy:
                return
            multiprocessing.connection.wait([worker.connection for worker in busy], timeout=1)
            for worker in list(busy):
                yield from _news(worker, busy, idle, patience)
    finally:
        for worker in (*busy, *idle):
            worker.end()


def _news(worker: _Worker, busy: list[_Worker], idle: list[_Worker], patience: float) -> Iterator[tuple[Any, Any, str]]:
    try:
        while worker.connection.poll():
            kind, value = worker.connection.recv()
            if kind == "at":
                worker.hear(value)
                continue
            busy.remove(worker)
            if worker.ran < _CASES_A_PROCESS:
                idle.append(worker)
            else:
                worker.end()
            yield worker.item, value, ""
            return
    except (EOFError, OSError):
        busy.remove(worker)
        worker.end()
        yield worker.item, None, f"the process died at: {worker.at}"
        return
    if worker.hangs(patience):
        busy.remove(worker)
        worker.end()
        yield worker.item, None, f"hung at: {worker.at}"
