"""Rare collections: while a model is traced and planned, Python looks for garbage less often.

Graphs are many objects, and hardly any of them is garbage while they are worked on. By default Python visits the
youngest after each few hundred that were made, and all that the process has every hundredth time. There is no private
interface here, but everything above may need it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from roundpipe_fx.torch_private.forks import ForkedLock

__all__ = ["rare_collections"]

_THRESHOLDS = (20_000, 20, 50)
"""Objects made before the youngest are visited; such visits before those of the second, and of the third generation."""

_lock = ForkedLock()
_entered = 0
_before: tuple[int, ...] = ()
_during: tuple[int, ...] = ()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Context manager that raises the thresholds of Python's garbage collector, which it restores on exit.

    Threads may enter it together; the last one that leaves restores. Thresholds that are higher already are kept, and
    a collector that is switched off by a threshold of 0 stays so.
    """
    global _entered, _before, _during
    with _lock:
        if not _entered:
            _before = gc.get_threshold()
            gc.set_threshold(*_raise_thresholds(_before))
            _during = gc.get_threshold()  # not every version of Python has three
        _entered += 1
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            # Whoever sets thresholds meanwhile means them to stay.
            if not _entered and gc.get_threshold() == _during:
                gc.set_threshold(*_before)


def _raise_thresholds(thresholds: tuple[int, ...]) -> tuple[int, ...]:
    youngest, *older = map(max, thresholds, _THRESHOLDS)
    return (youngest if thresholds[0] else 0, *older)
