"""Stopped: what ends a worker's part of a run that has failed elsewhere."""

from __future__ import annotations

__all__ = ["Stopped"]


class Stopped(Exception):
    """Another worker has failed, so this one must not go on."""
