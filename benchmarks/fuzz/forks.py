"""Forked children, as those of a ``DataLoader`` are: whatever they run has to end."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

__all__ = ["in_child"]


def in_child(task: Callable[[], str], seconds: float) -> str:
    """What a task returns in a forked child; or what became of it: ``"it hangs"``, ``"it died"``, ``"it raised …"``.

    Args:
        task: returns a short text.
        seconds: after which it hangs.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = task()
        except BaseException as error:
            text = f"it raised {type(error).__name__}: {error}"
        os.write(writing, text.encode()[:2000])
        os._exit(0)  # nothing that the parent is to clean up is the child's
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], seconds)
        if not ready:
            os.kill(child, signal.SIGKILL)
        text = os.read(reading, 2000).decode(errors="replace") if ready else "it hangs"
    finally:
        os.close(reading)
        os.waitpid(child, 0)
    return text or "it died"
