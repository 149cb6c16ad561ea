"""The choice of a schedule: the least recomputation whose simulated peak stays within the budget.

Between the two schedules of the frontier that enclose the budget, more are simulated
(:mod:`roundpipe_fx.remat.chain_search`)::

    budget 10 GiB        peak GiB   12.0   10.5   9.8   9.1   8.7
                         seconds     0.0    0.2   0.3   0.5   0.9
                         chosen                   ▲                  unless one between 10.5 and 9.8 fits and is quicker
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from roundpipe_fx.analysis.operations import Operation, OperationGraph
from roundpipe_fx.budget import Infeasible, bytes_text, limit_of, share_hint
from roundpipe_fx.ir.joint_graph import module_path
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import SearchResult, SimulatedSchedule, refine, save_everything, search
from roundpipe_fx.remat.multi_call_step import search_for_step
from roundpipe_fx.remat.schedule import RematChoice, simulate
from roundpipe_fx.torch_private import module_path_text


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The chosen schedule, and the candidates that it was chosen from.

    Attributes:
        candidate: the schedule, with its peak.
        limit: the budget in bytes.
        graph: the operations that plans are searched for.
        frontier: (peak bytes, modelled seconds of recomputation) of all candidates, highest peak first.
        followed: the operations of the schedule: those of ``graph``, or the same with equal values shared.
        fits: whether it is expected to stay within the limit. Else no candidate does, and this is the one with the
            lowest peak.
    """

    candidate: SimulatedSchedule
    limit: int
    graph: OperationGraph
    frontier: tuple[tuple[int, float], ...]
    followed: OperationGraph
    fits: bool = True

    def read_operations(self) -> OperationGraph:
        """The operations that plans are searched for."""
        return self.graph


def choose(
    graph: OperationGraph,
    budget: int | float,
    share: float = 1.0,
    margin: int = 0,
    whole: OperationGraph | None = None,
    emitted: Sequence[tuple[SimulatedSchedule, int]] = (),
) -> Chosen:
    """Choose a schedule for a budget.

    Args:
        budget: bytes, or a share of the way from the least peak that can be reached to that of keeping everything.
        share: of the budget that may be used, in (0, 1].
        margin: bytes that emitted programs were found to need beyond what was simulated here.
        whole: the same with equal values shared, for schedules that save everything.
        emitted: candidates that were chosen before, with the peak bytes of the programs emitted for them.
    """
    candidates, limit, kept, followed = _find_candidates(graph, budget, share, margin, whole)
    frontier = tuple((candidate.peak.bytes, candidate.seconds) for candidate in candidates)
    lowest = candidates[-1]
    known = [(item.schedule.choice, item.peak.bytes, peak) for item, peak in emitted]

    # Emitted programs need a little more than was simulated (rounding, alignment). Where this very plan was emitted
    # before, its bytes are known; for others the margin stands in.
    def expected(candidate: SimulatedSchedule) -> int:
        same = (peak for choice, size, peak in known if (choice, size) == _key(candidate))
        return next(same, candidate.peak.bytes + margin)

    def chosen(candidate: SimulatedSchedule, limit: int, fits: bool = True) -> Chosen:
        return Chosen(
            candidate=candidate,
            limit=limit,
            graph=graph,
            frontier=frontier,
            followed=followed if candidate is kept else graph,
            fits=fits,
        )

    # Highest peak first, so the first that fits recomputes least.
    for candidate in candidates:
        if expected(candidate) <= limit:
            return chosen(candidate, limit)
    # A fraction of the reachable range can always be met: the lowest plan meets any.
    if isinstance(budget, float):
        return chosen(lowest, max(limit, expected(lowest)))
    # The margin comes from other candidates; what this one's programs need is known once they are emitted.
    tried = any((choice, size) == _key(lowest) for choice, size, _ in known)
    return chosen(lowest, limit, fits=not tried and lowest.peak.bytes <= limit)


def list_choices(
    graph: OperationGraph, budget: int | float, share: float, whole: OperationGraph | None
) -> list[Chosen]:
    """All schedules, each as if it was chosen, the least recomputation first: where emitted programs need less than is
    simulated here, since values leave the device or are fused. Arguments as for :func:`choose`."""
    candidates, limit, kept, followed = _find_candidates(graph, budget, share, 0, whole)
    frontier = tuple((candidate.peak.bytes, candidate.seconds) for candidate in candidates)
    return [
        Chosen(
            candidate=candidate,
            limit=limit,
            graph=graph,
            frontier=frontier,
            followed=followed if candidate is kept else graph,
        )
        for candidate in candidates
    ]


def _find_candidates(
    graph: OperationGraph, budget: int | float, share: float, margin: int, whole: OperationGraph | None
) -> tuple[list[SimulatedSchedule], int, SimulatedSchedule, OperationGraph]:
    """The schedules to choose from, highest peak first; the limit in bytes; the one that keeps everything, and its
    operations."""
    blocks = Blocks(graph)
    kept, followed = save_everything(blocks), graph
    if whole is not None:
        # Common subexpressions were merged in `whole`: the plan that keeps everything then holds equal values once.
        shared = save_everything(Blocks(whole))
        if shared.peak.bytes <= kept.peak.bytes:
            kept, followed = shared, whole
    fits = kept.peak.bytes + margin <= budget * share if isinstance(budget, int) else budget == 1.0
    # A step that fits without recomputation needs no search.
    if fits and share == 1.0 and not graph.regions:
        result = SearchResult([kept], [])
    else:
        result = search(blocks, kept=kept) if graph.step is None else search_for_step(blocks)
    candidates = result.candidates
    limit = int(limit_of(budget, candidates[-1].peak.bytes, candidates[0].peak.bytes) * share)
    return refine(blocks, result, limit - margin), limit, kept, followed


def _key(candidate: SimulatedSchedule) -> tuple[RematChoice, int]:
    return candidate.schedule.choice, candidate.peak.bytes


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The peak that keeps a plan from fitting.

    Attributes:
        operation: runs at the peak; ``None``: the peak is between operations.
        live: names and bytes of the values that are alive there.
        chosen: the plan of a program with the lowest peak.
        text: what the user is told.
    """

    operation: Operation | None = None
    live: tuple[tuple[str, int], ...] = ()
    chosen: Chosen | None = None
    text: str = ""

    @property
    def is_of_one_operation(self) -> bool:
        """Return whether one operation alone needs more than the budget, and no plan was searched for."""
        return self.chosen is None and not self.text


Unmet: TypeAlias = Infeasible[Bottleneck]
"""No plan stays within the budget; the bottleneck says why."""


def find_bottleneck(chosen: Chosen, minimum: int) -> Unmet:
    """Find the bottleneck of a plan.

    Args:
        minimum: peak of the programs that were emitted for it, in bytes.
    """
    peak = simulate(chosen.followed, chosen.candidate.schedule, list_live=True)
    return Infeasible(minimum=minimum, bottleneck=Bottleneck(operation=peak.operation, live=peak.live, chosen=chosen))


def write_refusal(chosen: Chosen, minimum: int, budget: int | float) -> str:
    """Write the message about a budget that no plan stays within.

    Args:
        chosen: the candidate with the lowest peak.
        minimum: peak of the programs that were emitted for it.
        budget: that was asked for.
    """
    graph = chosen.graph
    peak = simulate(graph, chosen.candidate.schedule, list_live=True)
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
    calls = f", with {graph.step.alive} calls alive at once," if graph.step is not None and graph.step.alive > 1 else ""
    live = ", ".join(f"{name} {bytes_text(size)}" for name, size in peak.live)
    return (
        f"memory_budget of {chosen.limit} bytes ({bytes_text(chosen.limit)}) cannot be met: a step of this model "
        f"on this batch{calls} needs at least {minimum} bytes ({bytes_text(minimum)}). The peak is {where}, with "
        f"these values alive: {live}. Use a smaller batch, or a budget of at least the minimum.{share_hint(budget)}"
    )
