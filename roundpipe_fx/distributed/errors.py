"""Errors that concern several ranks."""

from __future__ import annotations

__all__ = ["RanksDifferError", "RemoteError"]


class RemoteError(RuntimeError):
    """Another rank of the pipeline has failed. The message has its number, and what it raised."""


class RanksDifferError(RuntimeError):
    """The ranks of a pipeline were given different options, batches or code."""
