"""Long tests: `make test` leaves them out, `make test-all` runs all of them, and CI a third in each run, in turn.

A test is long by ``@pytest.mark.long``. Cases of a test are long that :func:`long_but` does not name, or all but every
fourth of them by ``@pytest.mark.quick_every(4)``::

    case                  0  1  2  3  4  5  6  7
    `make test`           ×           ×                 quick_every(4)
    --long-part 0/3       ×  ×        ×  ×     ×        the quick cases, and of the long ones 0, 3, …
    --long-part 1/3       ×     ×     ×     ×           1, 4, …
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

__all__ = ["long_but", "mark_long_cases", "split_long_tests"]


def long_but(values: Iterable[Any], *, quick: Collection[Any]) -> list[Any]:
    """Values for ``parametrize``, those that are not among the quick ones marked as long."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.long) for value in values]


def mark_long_cases(items: Iterable[pytest.Item]) -> None:
    """Mark the cases as long that ``quick_every`` leaves."""
    cases: Counter[str] = Counter()
    for item in items:
        quick = item.get_closest_marker("quick_every")
        if quick is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] % quick.args[0]:
                item.add_marker(pytest.mark.long)
            cases[test] += 1


def split_long_tests(
    items: Sequence[pytest.Item], part: int, parts: int
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests of one part, and those that are left out.

    Args:
        part: its number; beyond the last, it begins at the first again.
    """
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    number = 0
    for item in items:
        is_long = item.get_closest_marker("long") is not None
        (left if is_long and number % parts != part % parts else kept).append(item)
        number += is_long
    return kept, left
