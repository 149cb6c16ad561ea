"""Whether the program runs in a notebook, and which of its cells a file is."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["cell_of", "is_notebook"]


def is_notebook() -> bool:
    """Whether this is a kernel, whose results a notebook displays; IPython in a terminal is none."""
    return hasattr(_shell(), "kernel")


def cell_of(path: str) -> str:
    """The cell that IPython compiled under a file's name, as its tracebacks call it: ``In[3]``.

    Args:
        path: the name; of a cell it means nothing to anybody.

    Returns:
        the cell; ``""`` if it is none.
    """
    format_code_name = getattr(getattr(_shell(), "compile", None), "format_code_name", None)
    named = format_code_name(path) if format_code_name is not None else None
    return str(named[1]) if named else ""


def _shell() -> Any:
    """IPython's, if the program runs in it."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
