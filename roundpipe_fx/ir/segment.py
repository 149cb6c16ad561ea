"""Segments and stages as plain data, as the passes that cut the graph return them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Consecutive forward nodes between two narrow places, with the backward nodes that belong to them.

    Attributes:
        index: position among the segments, first to last in the forward.
        forward_seconds: modelled seconds of its forward.
        backward_seconds: modelled seconds of its backward.
        entry_bytes: bytes of computed values that live across its beginning (0 for the first segment).
        fingerprint: equal for structurally identical segments.
    """

    index: int
    forward_seconds: float
    backward_seconds: float
    entry_bytes: int
    fingerprint: str

    @property
    def seconds(self) -> float:
        """Modelled seconds of forward and backward."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class StageCut:
    """A run of segments that is emitted together: ``first`` up to and including ``last``."""

    index: int
    first: int
    last: int


def backward_stages(cuts: Iterable[StageCut]) -> dict[int, int]:
    """By segment, the stage in which its backward runs.

    Args:
        cuts: the stages, in the order in which they run: of several that have a segment (RoundPipe's slots) it is the
            last one.
    """
    return {segment: cut.index for cut in cuts for segment in range(cut.first, cut.last + 1)}
