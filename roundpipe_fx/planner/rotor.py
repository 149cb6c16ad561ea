"""rotor's optimum on the chain of segments: all or nothing for each segment, what peers that take a chain can do.

Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019. The chain solver is the one that every plan
uses, with a single option a segment: keep all that its backward needs. A segment whose values were not kept is run
forward again, keeping all, right before its backward.
"""

from __future__ import annotations

from dataclasses import replace

from roundpipe_fx.planner.chain import LinkOption, solve_chain
from roundpipe_fx.planner.schedule import Blocks, Choice
from roundpipe_fx.planner.search import Candidate, best_of, chain_of, choice_of, everything_kept, levels, work_out

__all__ = ["rotor_candidates"]

_SLOTS = 500


def rotor_candidates(blocks: Blocks) -> list[Candidate]:
    """Candidates of rotor's kind of which none is better than another in peak and seconds, highest peak first."""
    graph = blocks.graph
    chain, savings = chain_of(blocks)
    everything = [options[0] for options in savings]
    links = []
    for link in chain.links:
        keep_all = link.options[0]
        bare = LinkOption(keep_all.held, link.seconds, keep_all.forward, max(keep_all.backward, keep_all.forward))
        links.append(replace(link, options=(keep_all,), bare=bare))
    found = [everything_kept(blocks)]
    for limit in (found[0].peak.bytes, found[0].peak.bytes // 3):
        solution = solve_chain(replace(chain, links=tuple(links)), limit, _SLOTS)
        for slots in levels(solution):
            decisions = solution.decisions(slots)
            choice = choice_of(graph, [[saved] for saved in everything], decisions)
            kept = {decision.link for decision in decisions if decision.option is not None}
            held = dict(choice.held)
            for segment in set(range(graph.segments)) - kept:
                held[segment] = held.get(segment, frozenset()) | everything[segment]
            found.append(work_out(blocks, Choice(choice.kept, held)))
    return best_of(found)
