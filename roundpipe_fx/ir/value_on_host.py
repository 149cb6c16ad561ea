"""A value that is on the host between the forward's program and the backward's, as data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ValueOnHost"]


@dataclass(frozen=True, kw_only=True)
class ValueOnHost:
    """A value that is on the host between forward and backward.

    Attributes:
        value: name of the value in the graph.
        name: in both programs.
        freed: the stage module after whose call in the forward its memory on the device is freed.
        reloaded: the stage module before whose call in the backward its copy to the device begins.
        back: the one that reads it first there.
    """

    value: str
    name: str
    freed: str
    reloaded: str
    back: str
