"""The page of a plan: one HTML file without network, in which a plan can be explored, and who shows it.

It is made from the plan's JSON. Style and scripts lie in ``page/``.
It is shown in the notebook that runs the program, or in a browser.
"""

from __future__ import annotations

import html
import json
import os
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roundpipe_fx.console.progress import is_notebook

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
    before, *placeholders = page.split("{{")
    return before + "".join(parts[piece.partition("}}")[0]] + piece.partition("}}")[2] for piece in placeholders)


def show_page(page: str) -> Any:
    """Show a page.

    Returns:
        in a notebook, an IPython object that displays the page in its cell; else ``None``.
    """
    if is_notebook():
        from IPython.display import HTML

        frame = f'<iframe srcdoc="{html.escape(page)}" style="width:100%;height:800px;border:0"></iframe>'
        return HTML(f"<div>{frame}</div>")
    with tempfile.NamedTemporaryFile("w", prefix="plan_", suffix=".html", delete=False, encoding="utf-8") as file:
        file.write(page)
    print(file.name)
    if _has_display():
        webbrowser.open(Path(file.name).as_uri())
    return None


def _has_display() -> bool:
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
