"""Progress bars for work that may take more than two seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

__all__ = ["progress"]

T = TypeVar("T")

_DELAY = 2.0


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Iterate, with a bar on standard error once it has taken two seconds; none where that is no terminal.

    Args:
        items: what to go through.
        what: a few words for people.
        total: how many items, where they cannot be counted.
    """
    return iter(tqdm(items, f"roundpipe_fx: {what}", total, leave=False, delay=_DELAY, disable=None))
