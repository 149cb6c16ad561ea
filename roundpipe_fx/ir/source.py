"""Where in the user's program a node comes from, for messages."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch import fx

__all__ = ["source_of"]


def source_of(node: fx.Node) -> str:
    """The innermost frame of a node's stack trace outside of PyTorch and of this package; ``""`` if there is none."""
    frames = re.split(r"(?m)^(?=  File )", node.stack_trace or "")
    skipped = [f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)]
    users = (frame for frame in reversed(frames) if frame.strip() and not any(own in frame for own in skipped))
    return next((frame.rstrip() for frame in users), "")
