"""Processes for measurements: some wait, with everything imported, while others measure."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.measurement import Row
from benchmarks.gpu.worker import END, failure


class Pool:
    """Processes that measure once each.

    Args:
        command: starts one.
        spare: number of processes that wait for an order.
        deadline: time (``time.monotonic``) at which measurements are stopped.
        longest: seconds after which a single one is stopped.
        environment: variables of the processes.
        folder: an empty one, for what they write to their error streams.
    """

    def __init__(
        self,
        command: Sequence[str],
        spare: int,
        *,
        deadline: float,
        longest: float,
        environment: Mapping[str, str],
        folder: Path,
    ) -> None:
        self._command, self._environment, self._folder = command, environment, folder
        self._deadline, self._longest = deadline, longest
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[subprocess.Popen[str]] = set()
        self._numbers = itertools.count()
        self._waiting = deque(self._start() for _ in range(spare))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._closed = True
            for process in self._running:
                _kill(process)
                process.wait()

    def measure(self, order: Mapping[str, Any]) -> Iterator[Row]:
        """Rows of a measurement as they are known; a row of the part ``failed`` if the process ends before its end.

        Args:
            order: for the process.
        """
        with self._lock:
            if self._closed or time.monotonic() >= self._deadline:
                return
            process, errors = self._waiting.popleft()
            self._waiting.append(self._start())
        assert process.stdin is not None and process.stdout is not None
        seconds = min(self._longest, self._deadline - time.monotonic())
        timer = threading.Timer(seconds, _kill, [process])
        timer.start()
        last: Row = {}
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended: why is said below
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
            for line in process.stdout:
                last = json.loads(line)
                if last != END:
                    yield last
            timer.cancel()
            if last != END and not self._closed and time.monotonic() < self._deadline:
                yield failure(order["measurement"], self._why(process, errors, seconds))
        finally:
            timer.cancel()
            _kill(process)
            with self._lock:
                self._running.discard(process)

    def _start(self) -> tuple[subprocess.Popen[str], Path]:
        path = self._folder / f"errors_{next(self._numbers)}.txt"
        with path.open("w") as errors:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=dict(self._environment),
                start_new_session=True,
            )
        self._running.add(process)
        return process, path

    @staticmethod
    def _why(process: subprocess.Popen[str], errors: Path, seconds: float) -> str:
        """The reason for which a process has ended before its measurement."""
        code = process.wait()
        lines = errors.read_text().splitlines()
        if code == -signal.SIGKILL:
            return f"stopped after {seconds:.0f} s"
        return f"the process ended with {code}: {lines[-1] if lines else ''}"


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process of this pool, and the processes that it has started."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
