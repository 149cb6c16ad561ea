"""Shows a page: in the notebook that runs the program, or in a browser."""

from __future__ import annotations

import html
import os
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

from roundpipe_fx.console.notebook import is_notebook

__all__ = ["show_page"]


def show_page(page: str) -> Any:
    """Show a page.

    Args:
        page: the HTML.

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
