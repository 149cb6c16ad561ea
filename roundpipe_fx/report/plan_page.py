"""The page of a plan: one HTML file without network, in which a plan can be explored.

It is made from the plan's JSON. Style and scripts lie in ``page/``.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

__all__ = ["page_of_plans"]

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = (
    "format",
    "theme",
    "plan_data",
    "canvas",
    "table",
    "memory_chart",
    "memory_view",
    "values_view",
    "device_rows",
    "curve_chart",
    "copies_chart",
    "frontier_view",
    "pipeline_view",
    "compare_view",
    "page",
)
"""In the order in which they need each other."""


def page_of_plans(plans: Sequence[str], names: Sequence[str]) -> str:
    """The page of one plan, or of two side by side.

    Args:
        plans: the plans as JSON.
        names: what they are called.

    Returns:
        the HTML.
    """
    data = ",".join(f'{{"name":{json.dumps(name)},"plan":{plan}}}' for name, plan in zip(names, plans, strict=True))
    parts = {
        "title": html.escape(" / ".join(names)),
        "style": (_FOLDER / "style.css").read_text(encoding="utf-8"),
        "script": "\n".join((_FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS),
        # Names in a plan are the user's: none of them may end the element that holds it.
        "plans": f"[{data}]".replace("<", "\\u003c"),
    }
    page = (_FOLDER / "page.html").read_text(encoding="utf-8")
    before, *rest = page.split("{{")
    return before + "".join(parts[piece.partition("}}")[0]] + piece.partition("}}")[2] for piece in rest)
