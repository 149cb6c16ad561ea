"""Options in tiles: what a segment may save, and in how many tiles it may run, decided together.

Copies of a graph have their regions of operations in ever more tiles, and are cut at the same places, so that each
region is in one segment. A segment then has the options of all its copies side by side; to the seconds of an option is
added what its copy takes longer, or less long, than the graph without tiles. Which copy each segment is of is part of
the chain's solution (:mod:`roundpipe_fx.remat.solve_chain`), for every amount of memory.

What is recomputed more than once is not considered here, nor how the tiles of one segment change what lives in another.
The segments that a solution has in tiles are planned for anew, as a graph of their own, which decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from roundpipe_fx.remat.chain import ChainStage, ChainStageOption, Decision, SegmentChain
from roundpipe_fx.remat.chain_search import FINE_SLOTS, levels
from roundpipe_fx.remat.options_on_host import HostTier, find_solutions_on_host
from roundpipe_fx.remat.solve_chain import solve_chain

_BEYOND = 1.1
"""Solutions that need up to so many times the budget are considered: plans often need less than the chain counts."""


@dataclass(frozen=True)
class ChainInTiles:
    """The segments of a copy.

    Attributes:
        seconds: by segment, modelled seconds of its forward and backward with nothing recomputed.
    """

    chain: SegmentChain
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class JoinedChain:
    """The segments of a graph with the options of all copies.

    Attributes:
        chain: the options of each segment.
        copies: by segment and option, the number of the copy that has it.
    """

    chain: SegmentChain
    copies: tuple[tuple[int, ...], ...]


def join_chains(copies: Sequence[ChainInTiles]) -> JoinedChain:
    """One chain that has the options of all copies.

    Args:
        copies: of one graph, cut at the same places; the first is without tiles.
    """
    # The first copy has no tiles: seconds and resident bytes of others are counted from it.
    whole = copies[0]
    stages: list[ChainStage] = []
    numbers: list[tuple[int, ...]] = []
    for segment, stage in enumerate(whole.chain.stages):
        options: list[tuple[int, ChainStageOption]] = []
        for number, copy in enumerate(copies):
            tiled_stage, longer = copy.chain.stages[segment], copy.seconds[segment] - whole.seconds[segment]
            options += [
                (number, _translate_option(option, tiled_stage, stage, longer)) for option in tiled_stage.options
            ]
        best = _drop_dominated(options)
        # Nothing is recomputed in these solutions but by options, so the rest of a stage is not read.
        stages.append(dataclasses.replace(stage, options=tuple(option for _, option in best)))
        numbers.append(tuple(number for number, _ in best))
    return JoinedChain(SegmentChain(tuple(stages), whole.chain.live_across), tuple(numbers))


def solve_joined(
    joined: JoinedChain, limit: int, tier: HostTier | None = None
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Seconds, and by segment the copy that it is of: each time so that less memory is needed, and more seconds.

    Args:
        joined: the segments with the options of all copies.
        limit: bytes; what needs much more is left out.
        tier: the host, where saved values may leave for it.
    """
    solutions = _solutions(joined.chain, limit) if tier is None else _solve_with_host(joined.chain, tier, limit)
    seen = set()
    # By seconds: the first copies that appear for a memory are the quickest ones.
    for seconds, decisions in solutions:
        chosen = {
            decision.stage: joined.copies[decision.stage][decision.option]
            for decision in decisions
            if decision.option is not None
        }
        copies = tuple(chosen[segment] for segment in range(len(joined.chain.stages)))
        if copies not in seen:
            seen.add(copies)
            yield seconds, copies


def _solutions(chain: SegmentChain, limit: int) -> Iterator[tuple[float, Sequence[Decision]]]:
    # More slots than elsewhere in proportion to the larger limit, so a slot has as many bytes.
    solution = solve_chain(chain, int(limit * _BEYOND), int(FINE_SLOTS * _BEYOND), nested=False)
    for memory in sorted(levels(solution), key=lambda memory: float(solution.seconds[memory])):
        yield float(solution.seconds[memory]), solution.decisions(memory)


def _solve_with_host(chain: SegmentChain, tier: HostTier, limit: int) -> Iterator[tuple[float, Sequence[Decision]]]:
    for solution in find_solutions_on_host(chain, tier, limit):
        yield solution.seconds, solution.decisions


def _translate_option(
    option: ChainStageOption, tiled_stage: ChainStage, stage: ChainStage, longer: float
) -> ChainStageOption:
    """An option of a copy's segment as one of the graph's, whose resident bytes and seconds are counted elsewhere."""
    return dataclasses.replace(
        option,
        seconds=option.seconds + longer,
        forward=option.forward + tiled_stage.resident_forward - stage.resident_forward,
        backward=option.backward + tiled_stage.resident - stage.resident,
    )


def _drop_dominated(options: Sequence[tuple[int, ChainStageOption]]) -> list[tuple[int, ChainStageOption]]:
    """Options that no other dominates in bytes held, peaks and seconds."""
    # Vectorized dominance: an option is dropped if one that is kept is no worse in all four figures.
    figures = np.array([(option.seconds, option.held, option.backward, option.forward) for _, option in options])
    order = sorted(range(len(options)), key=lambda position: (tuple(figures[position]), options[position][0]))
    best: list[int] = []
    for position in order:
        if not best or not (figures[best] <= figures[position]).all(1).any():
            best.append(position)
    return [options[position] for position in best]
