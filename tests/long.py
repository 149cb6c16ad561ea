"""Long tests: marked, and left out of ``make test``; ``make test-all`` runs them too."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["long_but"]


def long_but(values: Iterable[Any], *, quick: Collection[Any]) -> list[Any]:
    """Values for ``parametrize``, those that are not among the quick ones marked as long."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.long) for value in values]
