"""Several graphs: one plan for each of a step's graphs, so that the step stays within a budget.

Each graph has a ladder of plans, with ever fewer bytes for ever more seconds. Combinations are judged by a simulation
of the whole step: first the least level that fits for all graphs alike; then, graph by graph, the least that still
fits. The lowest peak is searched graph by graph from the best of those levels. This is not always the optimum, but it
does not depend on the budget, so the least budget that an error names can be met.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.analysis.step_of_calls import Footprint, NotedStep, StepNeeds, simulate_step_peak
from roundpipe_fx.budget import limit_of
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.multi_call_step import candidates_for_step
from roundpipe_fx.remat.schedule import footprint

_LEVELS = 16
_ROUNDS = 3
"""Number of rounds in which each graph's plan is revised for a lower peak."""


@dataclass(frozen=True)
class GraphPlan:
    """A plan of one graph.

    Attributes:
        seconds: modelled seconds of recomputation.
    """

    seconds: float
    footprint: Footprint


@dataclass(frozen=True)
class FittedGraphs:
    """A combination of plans.

    Attributes:
        limit: the budget in bytes.
        peak: of the step that needs most.
    """

    footprints: Mapping[str, Footprint]
    limit: int
    peak: int


def make_ladder(operations: OperationGraph, needs: StepNeeds) -> list[GraphPlan]:
    """The plans for a graph, quickest first.

    Args:
        needs: what its steps need.
    """
    candidates = candidates_for_step(Blocks(dataclasses.replace(operations, step=needs)))
    plans = [
        GraphPlan(item.seconds, dataclasses.replace(footprint(operations, item.schedule), gradients=needs.gradients))
        for item in candidates
    ]
    return sorted(plans, key=lambda plan: (plan.seconds, plan.footprint.held))


def fit_graphs(
    ladders: Mapping[str, Sequence[GraphPlan]],
    steps: Sequence[NotedStep],
    fixed: Mapping[str, Footprint],
    budget: int | float,
    share: float,
) -> FittedGraphs:
    """Plans for all graphs of some steps.

    Args:
        steps: that they take part in.
        fixed: footprints of graphs that have no ladder.
        budget: bytes, or a share of the way from the least that can be reached to nothing recomputed.
        share: of the budget that may be used.

    Returns:
        plans that fit with little recomputation; if none do, those that come closest.
    """
    graphs = list(ladders)

    def footprints(levels: list[int]) -> dict[str, Footprint]:
        chosen = {graph: ladders[graph][level].footprint for graph, level in zip(graphs, levels, strict=True)}
        return {**fixed, **chosen}

    def peak(levels: list[int]) -> int:
        return max(simulate_step_peak(step, footprints(levels)) for step in steps)

    # Level 0 of a ladder recomputes nothing, its last level needs least.
    last = [len(ladders[graph]) - 1 for graph in graphs]
    alike = [[round(level * level_of_graph / _LEVELS) for level_of_graph in last] for level in range(_LEVELS + 1)]
    lowest = min(reversed(alike), key=peak)
    # Coordinate descent: one graph's level at a time, the others fixed. A few rounds, since graphs influence each
    # other.
    for _ in range(_ROUNDS):
        for position, last_level in enumerate(last):
            tried = [[*lowest[:position], level, *lowest[position + 1 :]] for level in range(last_level + 1)]
            lowest = min(tried, key=peak)
    limit = int(limit_of(budget, peak(lowest), max(peak(alike[0]), peak(lowest))) * share)
    if isinstance(budget, float):
        limit = max(limit, peak(lowest))
    # All graphs at the same fraction of their ladders: the quickest such combination that fits.
    levels = next((combination for combination in alike if peak(combination) <= limit), lowest)
    # Then each graph goes up its ladder as far as the budget allows, the one that recomputes most first.
    for position in sorted(
        range(len(graphs)), key=lambda position: -ladders[graphs[position]][levels[position]].seconds
    ):
        tried = [[*levels[:position], level, *levels[position + 1 :]] for level in range(levels[position] + 1)]
        levels = next((combination for combination in tried if peak(combination) <= limit), levels)
    return FittedGraphs(footprints(levels), limit, peak(levels))
