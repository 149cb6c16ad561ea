"""Results of runs on a device: lines of JSON that are only ever appended, so that a run may be stopped at any time."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.measurement import Row
from benchmarks.side_by_side import RESULTS


@dataclass(frozen=True)
class Run:
    """A run of the command.

    Attributes:
        machine: its first row.
        rows: the others, as far as it came.
    """

    machine: Row
    rows: list[Row] = field(default_factory=list)


def path_of(card: str) -> Path:
    """The file for the results of a card."""
    return RESULTS / f"gpu_{re.sub('[^a-z0-9]+', '_', card.lower()).strip('_')}.jsonl"


class Log:
    """Appends rows to a file and prints them; each is in the file before the next is measured.

    Args:
        path: the file; its folder is made.

    Attributes:
        rows: those that were added.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self._path = path
        self._lock = threading.Lock()

    def add(self, row: Row) -> None:
        """Append a row."""
        line = json.dumps(row)
        with self._lock, self._path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
            self.rows.append(row)
            print(line, flush=True)


def read_runs(path: Path) -> list[Run]:
    """Runs in a file, the oldest first. A last line that was not written to its end is left out."""
    runs: list[Run] = []
    for row in _rows(path):
        if row["part"] == "machine":
            runs.append(Run(row))
        else:
            runs[-1].rows.append(row)
    return runs


def _rows(path: Path) -> Iterator[Row]:
    for line in path.read_text().splitlines():
        try:
            row: Row = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield row


def latest(runs: Sequence[Run], part: str) -> Run | None:
    """The latest run that has rows of a part, with these alone."""
    for run in reversed(runs):
        rows = [row for row in run.rows if row["part"] == part]
        if rows:
            return Run(run.machine, rows)
    return None
