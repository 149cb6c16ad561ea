"""Where kinds of operations are registered."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.fuzz.program import Builder

__all__ = ["BODIES", "KINDS", "WEIGHTS", "kind", "table"]

KINDS: dict[str, Callable[[Builder], None]] = {}
"""The pool: each writes itself."""
WEIGHTS: dict[str, float] = {}
"""How often each is drawn."""
BODIES: list[str] = []
"""Those whose elements have a body of others."""


def kind(weight: float = 1.0, body: bool = False) -> Callable[[Callable[[Builder], None]], Callable[[Builder], None]]:
    """Register a function that writes an operation, under its name."""

    def register(function: Callable[[Builder], None]) -> Callable[[Builder], None]:
        name = function.__name__.strip("_")
        assert name not in KINDS, name
        KINDS[name] = function
        WEIGHTS[name] = weight
        if body:
            BODIES.append(name)
        return function

    return register


def table(rows: dict[str, str], write: Callable[[Builder, str], None], weight: float) -> None:
    """Register a kind for each row, all written by one function that gets the row's text."""
    for name, text in rows.items():
        assert name not in KINDS, name
        KINDS[name] = lambda b, text=text: write(b, text)  # type: ignore[misc]
        WEIGHTS[name] = weight
