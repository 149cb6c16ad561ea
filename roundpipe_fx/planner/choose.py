"""The choice: the least recomputation whose peak stays within the budget."""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_fx.budget import InfeasibleBudgetError, bytes_text, limit_of
from roundpipe_fx.joint_graph import module_path
from roundpipe_fx.planner.blocks import Blocks
from roundpipe_fx.planner.operations import OperationGraph
from roundpipe_fx.planner.schedule import simulate
from roundpipe_fx.planner.search import Candidate, Found, everything_kept, refine, search
from roundpipe_fx.torch_private import module_path_text

__all__ = ["Chosen", "choose"]


@dataclass(frozen=True)
class Chosen:
    """What was chosen, and from what.

    Attributes:
        candidate: the schedule, with its peak.
        limit: the budget in bytes.
        graph: the operations that plans are searched for.
        frontier: (peak bytes, modelled seconds of recomputation) of all candidates, highest peak first.
        followed: the operations of the schedule: the same, or those with equal values shared.
    """

    candidate: Candidate
    limit: int
    graph: OperationGraph
    frontier: tuple[tuple[int, float], ...]
    followed: OperationGraph


def choose(
    graph: OperationGraph,
    budget: int | float,
    share: float = 1.0,
    margin: int = 0,
    whole: OperationGraph | None = None,
) -> Chosen:
    """Choose a schedule for a budget.

    Args:
        graph: the operations.
        budget: bytes, or a share of the way from the least peak that can be reached to that of keeping everything.
        share: of the budget that may be used, in (0, 1].
        margin: bytes that emitted programs were found to need beyond what was simulated here.
        whole: the same with equal values shared, for where everything is kept.

    Raises:
        InfeasibleBudgetError: the budget is below the least peak that can be reached.
    """
    blocks = Blocks(graph)
    kept, followed = everything_kept(blocks), graph
    if whole is not None:
        shared = everything_kept(Blocks(whole))
        if shared.peak.bytes < kept.peak.bytes:
            kept, followed = shared, whole
    fits = budget == 1.0 or (isinstance(budget, int) and kept.peak.bytes + margin <= budget * share)
    # What fits as it is needs no search.
    found = Found([kept], []) if fits and share == 1.0 and not graph.regions else search(blocks, kept=kept)
    candidates = found.candidates
    limit = int(limit_of(budget, candidates[-1].peak.bytes, candidates[0].peak.bytes) * share)
    candidates = refine(blocks, found, limit - margin)
    frontier = tuple((candidate.peak.bytes, candidate.seconds) for candidate in candidates)
    for candidate in candidates:
        if candidate.peak.bytes + margin <= limit or (isinstance(budget, float) and candidate is candidates[-1]):
            limit = max(limit, candidate.peak.bytes + margin)
            return Chosen(candidate, limit, graph, frontier, followed if candidate is kept else graph)
    raise _infeasible(graph, candidates[-1], limit, margin)


def _infeasible(graph: OperationGraph, lowest: Candidate, limit: int, margin: int) -> InfeasibleBudgetError:
    peak = simulate(graph, lowest.schedule, list_live=True)
    if peak.operation is None:
        loss = "between its forward and its backward, while a loss is computed outside the model"
        where = loss if peak.backward else "at its beginning"
    else:
        module = module_path(peak.operation.node, module_path_text) or "the model"
        phase = "backward" if peak.backward else "forward"
        where = (
            f"in the {phase} of {module} (stage {graph.stages[peak.segment]}, segment {peak.segment}, at "
            f"{peak.operation.node.name})"
        )
    minimum = peak.bytes + margin
    live = ", ".join(f"{name} {bytes_text(size)}" for name, size in peak.live)
    return InfeasibleBudgetError(
        f"memory_budget of {limit} bytes ({bytes_text(limit)}) cannot be met: a step of this model on this batch needs "
        f"at least {minimum} bytes ({bytes_text(minimum)}). What binds is {where}, where these are alive: "
        f"{live}. Use a smaller batch, or a budget of at least the minimum.",
        minimum,
    )
