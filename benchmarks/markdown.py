"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table, by the headings of its first row."""
    headings = list(rows[0])
    lines = [_line(headings), _line(["---"] * len(headings))]
    return lines + [_line(_cell(row[heading]) for heading in headings) for row in rows]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")
