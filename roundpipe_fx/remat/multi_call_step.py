"""Several calls: plans for a graph whose calls are alive at once, with each other or with calls of other graphs.

Saved values are then multiplied by the calls, as by microbatches in flight. So the chain's solutions for that number of
microbatches (:mod:`roundpipe_fx.remat.in_flight`) are considered beside those for one. A simulation of the whole step
judges all of them.
"""

from __future__ import annotations

import dataclasses

from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import (
    ParetoPoint,
    SearchResult,
    SimulatedSchedule,
    make_schedule_of_choice,
    pareto_schedules,
    sample_evenly,
    search,
)
from roundpipe_fx.remat.in_flight import SegmentRun, find_points_of_run
from roundpipe_fx.remat.schedule import simulate
from roundpipe_fx.remat.segment_chain import chain_of

_JUDGED = 12
"""Number of the solutions for several calls that are simulated."""


def search_for_step(blocks: Blocks) -> SearchResult:
    """As :func:`search`, with the peaks of a step of several calls.

    Args:
        blocks: of a graph that knows the needs of its step.
    """
    candidates, points = _simulate_candidates(blocks)
    return SearchResult(pareto_schedules(candidates), points)


def candidates_for_step(blocks: Blocks) -> list[SimulatedSchedule]:
    """All candidates that :func:`search_for_step` simulates, including dominated ones: beside other calls they may
    win."""
    return _simulate_candidates(blocks)[0]


def _simulate_candidates(blocks: Blocks) -> tuple[list[SimulatedSchedule], list[ParetoPoint]]:
    graph = blocks.graph
    assert graph.step is not None
    alone = Blocks(dataclasses.replace(graph, step=None))
    result = search(alone)
    candidates = [SimulatedSchedule(item.schedule, simulate(graph, item.schedule)) for item in result.candidates]
    points = result.points
    alive = graph.step.alive_of_all
    if alive > 1:
        # Solutions for `alive` copies of the saved values; judged by the step's own simulation like all others.
        chain, save_options = chain_of(alone)
        run = SegmentRun(0, graph.segments, frozenset({0}), alive)
        more = find_points_of_run(graph, chain, save_options, run)
        candidates += [make_schedule_of_choice(blocks, point.choice()) for point in sample_evenly(more, _JUDGED)]
        points = sorted([*points, *more], key=lambda point: point.seconds)
    return candidates, points
