"""Run a function in a process that is forked from this one."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable

__all__ = ["in_forked_child"]

_PATIENCE = 60.0


def in_forked_child(function: Callable[[], object]) -> None:
    """Call a function in a forked process.

    Args:
        function: asserts something.

    Raises:
        AssertionError: it has raised there, with its traceback as text, or it hangs.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException:
            os.write(writing, traceback.format_exc()[-4000:].encode())
        finally:
            os._exit(0)
    os.close(writing)
    end = time.monotonic() + _PATIENCE
    try:
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError("the forked process hangs")
            time.sleep(0.01)
        said = os.read(reading, 4096).decode()
    finally:
        os.close(reading)
    assert not said, said
