"""Stages in pieces: divide each device's stage into several, so that copies to the host overlap with other actions.

A copy overlaps with the device's actions between those that compute and read the value. A device with a single stage
that runs its backward at once has no such action. ::

    whole         F0.0 B0.0 F0.1 B0.1 …                         nothing can leave
    in pieces     F0.0 F1.0 F2.0 B2.0 B1.0 B0.0 F0.1 …          of F0.0, beside F1.0; back beside B2.0

Pieces are segments. They are tried where whole stages recompute, and taken if values leave and the step is shorter
(:func:`roundpipe_fx.planner.search.prefer_finer_stages`).
"""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.segment import StageCut
from roundpipe_fx.pipeline.lowered_pipeline import has_host
from roundpipe_fx.pipeline.settings import Pipelining
from roundpipe_fx.schedules import ScheduleSpec

_MOST = 64
"""Pieces of all stages: each takes a call for each microbatch."""


def can_divide_stages(setting: Setting, pipelining: Pipelining, spec: ScheduleSpec) -> bool:
    """Return whether stages may be in pieces.

    Not an offloaded model's: its gradients are summed by residency window, so in other windows they are rounded
    otherwise than in a step in which everything stays. Nor where parameters are gathered by stage.

    Args:
        setting: what lowering knows besides the graph.
    """
    return (
        setting.context.training
        and spec.takes_pieces
        and setting.options.stages == "auto"
        and has_host(setting, pipelining)
        and pipelining.sends_unasked
        and not pipelining.offloaded
        and not pipelining.sharded
        and pipelining.checkpoint is None
    )


def find_piece_starts(cuts: Sequence[StageCut]) -> list[int]:
    """Find the first segment of each piece, so that all stages have the same number of pieces."""
    sizes = [cut.last - cut.first + 1 for cut in cuts]
    count = max(min(min(sizes), _MOST // len(cuts)), 1)
    return [cut.first + piece * size // count for cut, size in zip(cuts, sizes, strict=True) for piece in range(count)]
