"""Stages in pieces: the stage of a device becomes several, so that values have something to be copied beside.

A value is copied to the host beside actions of its device between those that make and read it. A device with a single
stage, which runs its backward at once, has none. ::

    whole         F0.0 B0.0 F0.1 B0.1 …                         nothing can leave
    in pieces     F0.0 F1.0 F2.0 B2.0 B1.0 B0.0 F0.1 …          of F0.0, beside F1.0; back beside B2.0

Pieces are segments. They are tried where whole stages recompute, and taken if values leave and the step is shorter.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence

from roundpipe_fx.budget import Found, Infeasible, Result, first_found
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.segment import StageCut
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline, has_host
from roundpipe_fx.pipeline.settings import Pipelining
from roundpipe_fx.schedules import ScheduleSpec

__all__ = ["in_pieces_if_shorter", "may_be_in_pieces", "pieces_of"]

log = logging.getLogger(__name__)

_MOST = 64
"""Pieces of all stages: each takes a call for each microbatch."""


def may_be_in_pieces(setting: Setting, pipelining: Pipelining, spec: ScheduleSpec) -> bool:
    """Whether stages may be in pieces.

    Not an offloaded model's: its gradients are summed by residency window, so in other windows they are rounded
    otherwise than in a step in which everything stays. Nor where parameters are gathered by stage.

    Args:
        setting: what lowering knows besides the graph.
        pipelining: the user's.
        spec: of the schedule.
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


def pieces_of(cuts: Sequence[StageCut]) -> list[int]:
    """The first segments of the pieces of some stages, of which each has as many.

    Args:
        cuts: the stages.
    """
    sizes = [cut.last - cut.first + 1 for cut in cuts]
    count = max(min(min(sizes), _MOST // len(cuts)), 1)
    return [cut.first + piece * size // count for cut, size in zip(cuts, sizes, strict=True) for piece in range(count)]


def in_pieces_if_shorter(
    joint: JointGraph,
    lower: Callable[..., Result[LoweredPipeline]],
    setting: Setting,
    microbatches: int,
) -> Result[LoweredPipeline]:
    """A pipeline with its stages in pieces if whole ones recompute, or do not fit, and the step is shorter so.

    Args:
        joint: the graph of a microbatch.
        lower: takes a graph, which is rewritten, a setting, and ``in_pieces``.
        setting: what lowering knows besides the graph.
        microbatches: how many there are.
    """
    whole = lower(joint.copy(), setting)
    options, within = setting.options, setting
    if isinstance(whole, Found):
        if not whole.value.main.lowered.recompute_seconds:
            return whole
        assert whole.value.budget is not None
        if isinstance(options.memory_budget, float):  # a share of what whole stages need, as bytes
            as_bytes = math.ceil(whole.value.budget / setting.share)
            within = setting.knowing(options=dataclasses.replace(options, memory_budget=as_bytes))
    pieces = lower(joint.copy(), within, in_pieces=True)
    if isinstance(pieces, Infeasible):
        return first_found((whole, pieces))
    tried = dataclasses.replace(pieces.value, allowed=pieces.value.allowed if within is setting else None)
    if isinstance(whole, Infeasible):
        return Found(tried)
    makespans = [pipeline.predict(microbatches).makespan for pipeline in (whole.value, tried)]
    log.info("stages in pieces: %.3f ms after %.3f", makespans[1] * 1e3, makespans[0] * 1e3)
    return Found(tried) if tried.offload is not None and makespans[1] < makespans[0] else whole
