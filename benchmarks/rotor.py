"""rotor's optimum on the chain of segments: all or nothing for each segment, what peers that take a chain can do.

Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019. The chain solver is the one that every plan
uses, with a single option a segment: keep all that its backward needs. A segment whose values were not kept is run
forward again, keeping all, right before its backward. Operations run in autograd's order, and none writes its result
over an operand.
"""

from __future__ import annotations

from dataclasses import replace

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain import ChainStageOption
from roundpipe_fx.remat.chain_search import (
    SimulatedSchedule,
    levels,
    make_schedule_of_choice,
    pareto_schedules,
    sample_evenly,
    save_everything,
)
from roundpipe_fx.remat.follow_sequence import as_in_eager_autograd
from roundpipe_fx.remat.schedule import RematChoice
from roundpipe_fx.remat.segment_chain import chain_of, make_remat_choice
from roundpipe_fx.remat.solve_chain import solve_chain

__all__ = ["rotor_candidates"]

_SLOTS = 500
_LEVELS = 12


def rotor_candidates(graph: OperationGraph) -> list[SimulatedSchedule]:
    """Candidates of rotor's kind of which none is better than another in peak and seconds, highest peak first."""
    graph = as_in_eager_autograd(graph)
    blocks = Blocks(graph, reduce_peak=False)
    chain, save_options = chain_of(blocks)
    # Options come by seconds: the first recomputes nothing.
    everything = [options[0] for options in save_options]
    stages = []
    for stage in chain.stages:
        all_kept = stage.options[0]
        again = ChainStageOption(
            all_kept.held, stage.seconds, all_kept.forward, max(all_kept.backward, all_kept.forward)
        )
        stages.append(replace(stage, options=(all_kept,), unsaved_options=(again,)))
    found = [save_everything(blocks)]
    for limit in (found[0].peak.bytes, found[0].peak.bytes // 3):
        solution = solve_chain(replace(chain, stages=tuple(stages)), limit, _SLOTS)
        for slots in sample_evenly(levels(solution), _LEVELS):
            decisions = solution.decisions(slots)
            choice = make_remat_choice(graph, [[save_option] for save_option in everything], decisions)
            held = dict(choice.held)
            for decision in decisions:
                if decision.unsaved_option is not None:
                    held[decision.stage] = held.get(decision.stage, frozenset()) | everything[decision.stage].saved
            found.append(make_schedule_of_choice(blocks, RematChoice(choice.kept, held)))
    return pareto_schedules(found)
