"""Microbatches in flight: save options of a run of segments on a device that holds several microbatches' saved values.

A device of a pipeline holds the saved values of every microbatch whose forward has run and whose backward has not, and
runs one microbatch at a time. Saved bytes are therefore multiplied by the microbatches in flight; recomputed ones are
not. The more microbatches are in flight, the more it pays to save only what enters a stage.

The chain (:mod:`roundpipe_fx.remat.solve_chain`) is solved for every amount of memory: once with saved bytes
multiplied, which does not count those of later stages after the backward has come back to earlier ones; and for several
prices of a saved byte, which finds no more than a convex hull. The solutions that no other one dominates in seconds and
in bytes are taken, where bytes are those of one microbatch plus what the others save. The simulation of the schedule
has the last word. ::

    device 0 of 4, 1F1B      F0 F1 F2 F3 B0 …      four microbatches in flight: a saved byte counts four times
    device 3 of 4            F0 B0 F1 B1 …         one in flight: a saved byte counts once
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.remat.chain import SegmentChain
from roundpipe_fx.remat.chain_search import FINE_SLOTS, NESTED_SHARE, ParetoPoint, levels, nested_slots, sample_evenly
from roundpipe_fx.remat.schedule import RematChoice
from roundpipe_fx.remat.segment_chain import SaveOption, make_remat_choice
from roundpipe_fx.remat.solve_chain import Solution, solve_chain

_MOST = 32
"""Maximum number of points of a run to choose from."""
_LEVELS = 24
"""Number of solutions of a chain that are considered, spread over all amounts of memory."""
_PRICES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Prices of saved bytes: at a price of 1, saving everything costs as much as recomputing everything."""


@dataclass(frozen=True)
class SegmentRun:
    """Segments whose kept values lie on the same devices.

    Attributes:
        first: number of the run's first segment.
        end: the segment after the last one.
        devices: numbers of the devices.
        in_flight: microbatches that each of these devices holds at most at one time.
    """

    first: int
    end: int
    devices: frozenset[int]
    in_flight: int


def find_points_of_run(
    graph: OperationGraph, chain: SegmentChain, save_options: list[list[SaveOption]], run: SegmentRun
) -> list[ParetoPoint]:
    """Choices of what a run keeps: ever fewer bytes for ever more seconds.

    Args:
        save_options: what its options save.
    """
    part = chain.part(run.first, run.end, run.in_flight == 1)
    # `most` is enough for the option with most bytes in each segment, so every solution lies below it.
    whole = sum(max(option.held for option in stage.options) for stage in part.stages)
    most = whole + max(
        max(option.forward, option.backward) + stage.resident + stage.resident_forward
        for stage in part.stages
        for option in stage.options
    )
    slowest = sum(max(option.seconds for option in (*stage.options, *stage.unsaved_options)) for stage in part.stages)
    solutions = [solve_chain(part, most, FINE_SLOTS, nested=False)]
    if run.in_flight > 1:
        # Two ways to say that other microbatches hold copies too: to count them, or to give saved bytes a price.
        # Neither finds all that the other does.
        # The rate at which saving everything costs as much as recomputing everything; prices are multiples of it.
        rate = slowest / max(whole, 1)
        counted = dataclasses.replace(part, times=run.in_flight)
        chains = [(counted, most + (run.in_flight - 1) * whole)]
        chains += [(dataclasses.replace(part, price=rate * price), most) for price in _PRICES]
    else:
        chains = [(part, most)]
    for variant, limit in chains:
        coarse = solve_chain(variant, limit, nested_slots(part))
        # Solve again with slots as fine as the low end needs: a coarse slot rounds every segment up.
        low = levels(coarse)[0] * coarse.slot
        solutions += [coarse, solve_chain(variant, int(low * NESTED_SHARE) + 1, nested_slots(part))]
    points = [point for solution in solutions for point in _points(graph, save_options, run, part, solution)]
    best: list[tuple[float, ParetoPoint]] = []
    # From the quickest on, only what takes fewer bytes than all quicker ones.
    for size, point in sorted(points, key=lambda item: (item[1].seconds, item[0])):
        if not best or size < best[-1][0]:
            best.append((size, point))
    return sample_evenly([point for _, point in best], _MOST)


def _points(
    graph: OperationGraph, save_options: list[list[SaveOption]], run: SegmentRun, part: SegmentChain, solution: Solution
) -> list[tuple[float, ParetoPoint]]:
    """Solutions with the bytes that they take with all microbatches in flight."""
    points: list[tuple[float, ParetoPoint]] = []
    for slots in sample_evenly(levels(solution), _LEVELS):
        decisions = solution.decisions(slots)
        # Bytes that stay from the forward to the backward, and that each microbatch in flight has.
        kept = sum(map(part.bytes_kept, decisions))
        # The price is no time: it is taken out of the seconds again.
        seconds = float(solution.seconds[slots]) - solution.chain.price * kept
        shifted = [
            dataclasses.replace(
                decision,
                before=None if decision.before is None else decision.before + run.first,
                stage=decision.stage + run.first,
                until=decision.until + run.first,
            )
            for decision in decisions
        ]
        # One microbatch is at its peak while the others hold what they have saved.
        size = part.needed(decisions) + (run.in_flight - 1) * kept
        points.append((size, ParetoPoint(max(seconds, 0.0), partial(make_remat_choice, graph, save_options, shifted))))
    return points


def merge_choices(choices: list[RematChoice]) -> RematChoice:
    """Choices for different segments as one."""
    return RematChoice(
        frozenset().union(*(choice.kept for choice in choices)),
        {segment: storages for choice in choices for segment, storages in choice.held.items()},
        {segment: remat_level for choice in choices for segment, remat_level in choice.remat_level.items()},
    )
