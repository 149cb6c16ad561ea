"""Progress of work that may take more than two seconds: on a terminal or in a notebook, never in a file."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tqdm import TqdmExperimentalWarning, TqdmWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmExperimentalWarning)
    warnings.simplefilter("ignore", TqdmWarning)  # a notebook without widgets shows nothing
    from tqdm.auto import tqdm

__all__ = ["progress", "working"]

T = TypeVar("T")

_DELAY = 2.0
_INTERVAL = 0.5


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Iterate, with a bar once it has taken two seconds.

    Args:
        items: what to go through.
        what: a few words for people.
        total: how many items, where they cannot be counted.

    Returns:
        an iterator over the items.
    """
    return iter(tqdm(items, f"roundpipe_fx: {what}", total, leave=False, delay=_DELAY, disable=None))


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Say what is being done, and for how long, once it has taken two seconds: for work that has no countable parts.

    Args:
        what: a few words for people.
    """
    line = tqdm(desc=f"roundpipe_fx: {what}", bar_format="{desc}, {elapsed}", leave=False, delay=_DELAY, disable=None)
    if line.disable:
        yield
        return
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(line, over), name="roundpipe_fx progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
        line.close()


def _tell(line: Any, over: threading.Event) -> None:
    wait = _DELAY
    while not over.wait(wait):
        line.refresh()
        wait = _INTERVAL
