"""Progress of work that may take more than two seconds: on a terminal or in a notebook, never in a file.

A notebook shows tqdm's widgets, or text if the package ``ipywidgets`` is not installed. Text is one line there: what
is done inside of something that is shown is not shown.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tqdm import TqdmExperimentalWarning, TqdmWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmExperimentalWarning)
    warnings.simplefilter("ignore", TqdmWarning)  # of a notebook without widgets
    from tqdm.auto import tqdm
    from tqdm.notebook import tqdm as tqdm_of_widgets


T = TypeVar("T")

_DELAY = 2.0
_INTERVAL = 0.5
_SIZE = {"ncols": 80, "nrows": 24}
"""Of a terminal that does not say how large it is."""
_refreshing = threading.Lock()
"""Held by a thread that shows a line, and with it tqdm's own lock; a child process would be forked with that held."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_refreshing.acquire, after_in_parent=_refreshing.release, after_in_child=_refreshing.release
    )


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Iterate, with a bar once it has taken two seconds.

    Args:
        items: what to go through.
        what: a few words for people.
        total: how many items, where they cannot be counted.

    Returns:
        an iterator over the items.
    """
    return iter(tqdm(items, f"roundpipe_fx: {what}", total, **_shown()))


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Say what is being done, and for how long, once it has taken two seconds: for work that has no countable parts.

    Args:
        what: a few words for people.
    """
    message = f"roundpipe_fx: {what}"
    line = tqdm(desc=message, bar_format="{desc}, {elapsed}", **_shown())
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


def _shown() -> dict[str, Any]:
    """For tqdm: where and when."""
    return {"leave": False, "delay": _DELAY, "disable": _disabled(), **_size()}


def _size() -> dict[str, int]:
    """For tqdm, which asks the terminal otherwise. One in a container or of ``script`` may say that it has no columns,
    and all text would be cut."""
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):
        return {}
    return {} if size.columns else _SIZE


def _disabled() -> bool | None:
    """For tqdm: ``None`` is wherever the output is no terminal, and a notebook's is none."""
    if not is_notebook():
        return None
    # A line below another one is reached by moving the cursor, which the output of a cell cannot.
    return not issubclass(tqdm, tqdm_of_widgets) and len(tqdm._instances) > 0


def _tell(line: Any, over: threading.Event) -> None:
    wait = _DELAY
    while not over.wait(wait):
        with _refreshing:
            line.refresh()
        line.last_print_t = time.time()  # closing clears the line only if it was shown, and looks here
        wait = _INTERVAL


def is_notebook() -> bool:
    """Return whether this is a kernel, whose results a notebook displays; IPython in a terminal is none."""
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
