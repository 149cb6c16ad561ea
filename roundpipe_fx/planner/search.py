"""The search for a plan: one for programs on one device and for schedules on several.

A candidate is evaluated by emitting what it decides and simulating that (:mod:`roundpipe_fx.planner.evaluation`). If it
does not stay within the budget, or recomputes, moves lead to others. All of them, the outermost first::

    move                   a program                              a schedule
    tile where it pays     the tilings of the chain of segments, if its step recomputes; of      tile_where_it_pays
                           a program, and of a model on the host, with values that leave
    tile more              the kind that holds most of the peak   the widest kinds first         tile_more
    cut elsewhere          -                                      for each schedule, and limit   lower_pipeline
                                                                  on an offloaded model's weights
    cut finer              copies to the host begin and end between stages                       cut_finer
    save less              the planner's schedules, in turn       levels of devices, bisected    …_within_budget
    recompute less         programs need less than was planned where Inductor fuses              judged_by_code,
                                                                                                 pipeline_by_code,
                                                                                                 …_within_budget
    send to the host       the chain's solutions in which         as many values as it takes;    with_host,
                           values leave; those that recompute     at some prices of the link     offload_values
                           less than the one that fits
    recompute early        what no gradient waits for             while a device waits           early, fill_waits

Of all candidates within the budget the quickest is taken (:func:`roundpipe_fx.planner.evaluation.quickest`). If there
is none, the least budget is told that was planned for.
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
from roundpipe_fx.planner.kinds_of_regions import Kinds, Tiles, names_of
from roundpipe_fx.planner.tile_more import tile_more
from roundpipe_fx.remat.choose import Unmet

log = logging.getLogger(__name__)

_WORTH = 0.02
"""Share by which a step is longer than with everything saved before other tiles are tried, each with a plan's time."""
_TRIED = 4
"""Number of the chain's best tiles for which plans are made: the chain counts not quite what plans need."""
_ROUGHLY = 1.01
"""Tiles are tried if the chain counts at most so many times the seconds of the shortest plan so far."""


def search(
    joint: JointGraph, budget: int | float, setting: Setting, space: Space[E], pays: bool = True
) -> Found[E] | Unmet:
    """The plan with the shortest step of those that the moves lead to, within a budget.

    Args:
        joint: an annotated graph, which is not cut.
        budget: bytes or a share.
        setting: what else there is to know.
        pays: whether tiles may be taken wherever they pay, if the user asked for that.
    """
    kinds = Kinds(joint, setting, space)
    result = tile_more(kinds, budget)
    if isinstance(result, Infeasible):
        return result
    tiles, met = result.value
    limit = met.emitted.budget
    if pays and setting.options.tiling == "auto" and limit is not None:
        met = _tile_where_it_pays(kinds, tiles, met, limit)
    return Found(met)


def _tile_where_it_pays(kinds: Kinds[E], tiles: Tiles, met: E, limit: int) -> E:
    """A plan with the tiles that make the step shortest, as the chain of segments counts it.

    For a pipeline, the chain is the whole model with one microbatch. Of several devices the first one holds about as
    much: one part of the model, with as many microbatches in flight as there are parts.

    Args:
        kinds: what can be tiled.
        met: a plan within the budget, which is returned if no other one is shorter.
        limit: bytes of the budget.
    """
    # What a step takes at the least: nothing recomputed, and no tile.
    runs = kinds.space.runs
    least = 0.0 if runs is None else runs * kinds.seconds
    # Tilings in the order of their modelled seconds: the first few are emitted, and the rest cannot be much better.
    for longer, tried in itertools.islice(kinds.by_segment(limit, tiles), _TRIED):
        # No later one can gain much: the plan is near what any takes, or they recompute more.
        if met.seconds <= (1 + _WORTH) * least or least + longer * (runs or 1) >= _ROUGHLY * met.seconds:
            break
        if names_of(tried) == names_of(tiles):
            continue
        # `planned_in` takes the share of a budget, so the limit is divided by it first.
        result = kinds.planned_in(tried, math.ceil(limit / kinds.setting.share))
        if isinstance(result, Found):
            log.info("in other tiles: %.3f ms after %.3f", 1e3 * result.value.seconds, 1e3 * met.seconds)
            met = min(met, result.value, key=lambda one: one.seconds)
    return met


def cut_finer(coarse: Found[E] | Unmet, finer: Callable[[], Found[E] | Unmet | None]) -> Found[E] | Unmet:
    """The plan for stages as they are, or one for finer ones if that fits alone, or is shorter.

    Copies to the host begin and end between stages: with few of them, nothing has the time to leave and to come back.

    Args:
        coarse: for stages as they are.
        finer: plans for finer ones, where values leave; ``None``: there are none.
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
