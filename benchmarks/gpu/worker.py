"""A process that is started before it is needed, measures once as its first line of input says, and ends.

So an error of a kernel, or a signal, ends one measurement and no more, and what one measurement has changed in PyTorch
or left in its allocator does not reach another. Rows are lines of JSON; the last line is ``{"end": true}``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.measurement import FULL, SMALL, Measurement, Row
from benchmarks.gpu.order import MACHINE, groups

END: Row = {"end": True}


def main() -> None:
    with os.fdopen(os.dup(1), "w") as rows:
        os.dup2(2, 1)  # what libraries print is no row
        order = json.loads(sys.stdin.readline())
        threading.Thread(target=_end_with_the_parent, daemon=True).start()
        for row in _measured(order):
            rows.write(json.dumps(row) + "\n")
            rows.flush()


def _end_with_the_parent() -> None:
    """Wait for the end of the input, which comes with that of the parent, and end this process and its children."""
    sys.stdin.read()
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _measured(order: dict[str, Any]) -> Iterator[Row]:
    sizes = SMALL if order["small"] else FULL
    if order["warm"]:
        sizes = dataclasses.replace(sizes, rounds=1)
    measurements: list[Measurement] = [MACHINE, *(item for group in groups(sizes) for item in group)]
    (measurement,) = (item for item in measurements if item.name == order["measurement"])
    try:
        yield from measurement.run(sizes, order["rows"])
    except Exception as error:
        yield failure(measurement.name, f"{type(error).__name__}: {error}")
    yield END


def failure(measurement: str, error: str) -> Row:
    """The row of a measurement that failed, with the first line of its error."""
    lines = error.splitlines() or [""]
    return {"part": "failed", "measurement": measurement, "error": lines[0][:300]}


if __name__ == "__main__":
    main()
