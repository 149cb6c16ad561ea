"""The search for a plan: one for programs on one device and for schedules on several.

A candidate is evaluated by emitting what it decides and simulating that (:mod:`roundpipe_fx.planner.evaluation`). If it
does not stay within the budget, or recomputes, moves lead to others. All of them, the outermost first::

    move                   a program                              a schedule
    tile where it pays     the tilings of the chain of segments, if its step recomputes; of      tile_where_it_pays
                           a program, and of a model on the host, with values that leave
    tile more              the class that holds most of the peak  the widest classes first       tile_more
    cut elsewhere          -                                      for each schedule, and limit   lower_pipeline
                                                                  on an offloaded model's weights
    finer stages           copies to the host begin and end between stages                       search
    save less              the planner's schedules, in turn       levels of devices, bisected    …_within_budget
    recompute less         programs need less than was planned where Inductor fuses              judged_by_code,
                                                                                                 pipeline_by_code,
                                                                                                 …_within_budget
        offload                the chain's solutions with offloaded   as many values as necessary;   with_host,
                           values that recompute less than the    at several prices of the link  offload_values
                           one that fits
    recompute early        operations without incoming gradients  while a device waits           early, fill_waits

    The quickest candidate within the budget wins (:func:`roundpipe_fx.planner.evaluation.find_quickest`). If there is
    none, the error names the smallest budget that a candidate met.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable

from roundpipe_fx.budget import Found, Infeasible, first_found
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.planner.evaluation import E, Space
from roundpipe_fx.planner.region_classes import RegionClasses, Tiles, tiling_key
from roundpipe_fx.planner.tile_more import tile_more
from roundpipe_fx.remat.choose import Unmet

log = logging.getLogger(__name__)

_WORTH = 0.02
"""Fraction by which a step must exceed one that saves everything before other tilings are planned."""
_TRIED = 4
"""Number of the chain's best tilings for which plans are made: the chain only estimates what plans need."""
_ROUGHLY = 1.01
"""A tiling is planned if the chain estimates at most this multiple of the shortest plan's seconds."""


def search(
    joint: JointGraph, budget: int | float, setting: Setting, space: Space[E], pays: bool = True
) -> Found[E] | Unmet:
    """Find the plan with the shortest step within a budget among those that the moves reach.

    Args:
        joint: an annotated graph that is not cut.
        budget: bytes or a fraction.
        pays: whether ``tiling="auto"`` may add tiles wherever they shorten the step.
    """
    classes = RegionClasses(joint, setting, space)
    result = tile_more(classes, budget)
    if isinstance(result, Infeasible):
        return result
    tiles, met = result.value
    limit = met.emitted.budget
    if pays and setting.options.tiling == "auto" and limit is not None:
        met = _add_paying_tiles(classes, tiles, met, limit)
    return Found(met)


def _add_paying_tiles(classes: RegionClasses[E], tiles: Tiles, met: E, limit: int) -> E:
    """Plan with the tilings that the chain of segments estimates to be the shortest.

    For a pipeline, the chain is the whole model with one microbatch. Of several devices the first one holds about as
    much: one part of the model, with as many microbatches in flight as there are parts.

    Args:
        met: a plan within the budget, returned if no other one is shorter.
        limit: bytes of the budget.
    """
    # What a step takes at the least: nothing recomputed, and no tile.
    runs = classes.space.runs
    least = 0.0 if runs is None else runs * classes.seconds
    # Tilings in the order of their modelled seconds: the first few are emitted, and the rest cannot be much better.
    for longer, tried in itertools.islice(classes.tilings_by_segment(limit, tiles), _TRIED):
        # No later one can gain much: the plan is near what any takes, or they recompute more.
        if met.seconds <= (1 + _WORTH) * least or least + longer * (runs or 1) >= _ROUGHLY * met.seconds:
            break
        if tiling_key(tried) == tiling_key(tiles):
            continue
        # `plan_in_tiles` multiplies a budget by the share, so the limit is divided by it first.
        result = classes.plan_in_tiles(tried, math.ceil(limit / classes.setting.share))
        if isinstance(result, Found):
            log.info("in other tiles: %.3f ms after %.3f", 1e3 * result.value.seconds, 1e3 * met.seconds)
            met = min(met, result.value, key=lambda evaluation: evaluation.seconds)
    return met


def prefer_finer_stages(coarse: Found[E] | Unmet, finer: Callable[[], Found[E] | Unmet | None]) -> Found[E] | Unmet:
    """Choose the plan for finer stages if only that one fits, or if it is shorter.

    Copies to the host begin and end between stages: with few stages there is no time to copy a value both ways.

    Args:
        coarse: the plan for the stages as they are.
        finer: plans with offloaded values for finer stages; returns ``None`` if there can be none.
    """
    # A plan that recomputes nothing leaves nothing to gain.
    if isinstance(coarse, Found) and not coarse.value.recompute_seconds:
        return coarse
    tried = finer()
    if tried is None:
        return coarse
    if isinstance(coarse, Infeasible) or isinstance(tried, Infeasible):
        return first_found((coarse, tried))
    log.info("in finer stages: %.3f ms after %.3f", 1e3 * tried.value.seconds, 1e3 * coarse.value.seconds)
    return tried if tried.value.seconds < coarse.value.seconds else coarse
