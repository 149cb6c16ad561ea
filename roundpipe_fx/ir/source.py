"""Where in the user's program a node comes from, for messages."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch import fx

from roundpipe_fx.console.progress import cell_of

_FRAME = re.compile(r'  File "([^"]+)", line (\d+)')

_SKIPPED = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def find_source(node: fx.Node) -> str:
    """Find the innermost frame of a node's stack trace outside of PyTorch and of this package; ``""`` if there is
    none."""
    frames = re.split(r"(?m)^(?=  File )", node.stack_trace or "")
    users = (frame for frame in reversed(frames) if frame.strip() and not any(folder in frame for folder in _SKIPPED))
    return next((frame.rstrip() for frame in users), "")


def find_line(node: fx.Node) -> str:
    """The file and the line of that frame, as ``modeling_gpt2.py:312``; of a notebook's cell ``In[3]:12``; ``""`` if
    there is none.

    Traces are read from their end, since a plan asks for thousands of them.
    """
    trace = node.stack_trace or ""
    end = len(trace)
    while (start := trace.rfind('  File "', 0, end)) >= 0:
        frame = _FRAME.match(trace, start)
        if frame is not None and not frame[1].startswith(_SKIPPED):
            return f"{cell_of(frame[1]) or os.path.basename(frame[1])}:{frame[2]}"
        end = start
    return ""
