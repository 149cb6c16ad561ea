"""Planning within a budget on one device: the least recomputation whose emitted programs stay within the budget.

The planner's schedules are simulated before anything is emitted, and their programs may need a little more. A schedule
whose programs exceed the budget is replaced by the next one, which saves less::

    schedule       3 ms recomputed   5 ms   8 ms        budget 10 GiB
    simulated      9.9 GiB           9.5    9.0
    programs       10.1 GiB          9.6    not emitted: 5 ms is used

With Inductor, programs need less than the operations do, so schedules that recompute less are tried too; with a host,
so are plans that offload.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.budget import Found, Infeasible, Result, first_found
from roundpipe_fx.compiler.emit import emit, find_saturating_size
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.operations_in_tiles import (
    add_gradients_to_needs,
    copy_uncut,
    cut_graph,
    read_graph_operations,
    without_common_subexpressions,
)
from roundpipe_fx.compiler.overlap import stages_to_overlap
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.compiler.values_on_host import is_host_requested
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.options import Inductor
from roundpipe_fx.passes.entry import PassLevel
from roundpipe_fx.planner.evaluation import Candidate, Evaluation, Space
from roundpipe_fx.planner.search import prefer_finer_stages
from roundpipe_fx.planner.with_host import (
    TRIED,
    choose_stage_starts,
    find_first_fitting,
    make_host_tier,
    plan_with_host,
)
from roundpipe_fx.remat.chain_search import SimulatedSchedule
from roundpipe_fx.remat.choose import Bottleneck, Chosen, Unmet, choose, find_bottleneck, list_choices
from roundpipe_fx.remat.early import move_early_within_peak
from roundpipe_fx.remat.follow_sequence import fit_sequence
from roundpipe_fx.remat.least_bytes import least_bytes
from roundpipe_fx.remat.options_on_host import HostTier
from roundpipe_fx.remat.schedule import remat_schedule
from roundpipe_fx.schedules.choose_offloads import OffloadRule

log = logging.getLogger(__name__)

_REPLANNING = "the programs exceed the budget by %d bytes more than was planned; replanning"


@dataclass(frozen=True, kw_only=True)
class CutProgram:
    """A graph that is cut into stages, for which plans are made.

    Attributes:
        shared: the same with equal values shared; ``None``: there are none.
        setting: what else there is to know.
    """

    joint: JointGraph
    shared: JointGraph | None
    operations: OperationGraph
    whole: OperationGraph | None
    setting: Setting

    @classmethod
    def of(cls, joint: JointGraph, setting: Setting) -> CutProgram:
        """That of a graph with segments."""
        step = add_gradients_to_needs(setting.step, joint)
        shared = without_common_subexpressions(joint, setting) if setting.options.rotor is None else None
        joint = setting.run(joint, PassLevel.STAGED)
        operations = dataclasses.replace(read_graph_operations(joint, setting), step=step)
        whole = None if shared is None else dataclasses.replace(read_graph_operations(shared, setting), step=step)
        return cls(joint=joint, shared=shared, operations=operations, whole=whole, setting=setting)

    @functools.cached_property
    def overlapped(self) -> Any:
        """Work beside which the early part of recomputations may run."""
        return stages_to_overlap(self.joint, find_saturating_size(self.setting))

    def evaluate(self, candidate: Candidate) -> Evaluation[Lowered]:
        """Emit and simulate a candidate. Programs may need a little more than was planned: then nothing is early.

        Args:
            candidate: its schedule was searched for.
        """
        chosen = candidate.saved
        assert isinstance(chosen, Chosen) and not isinstance(candidate.sent, OffloadRule)
        followed, schedule = chosen.followed, chosen.candidate.schedule
        # What is recomputed early would wait for copies from the host.
        early = schedule if candidate.sent else move_early_within_peak(followed, schedule, self.overlapped)
        setting = dataclasses.replace(self.setting, sent=candidate.sent or 0)
        for tried in (schedule,) if early is schedule else (early, schedule):
            copy = (self.joint if followed is not self.whole or self.shared is None else self.shared).copy()
            remat = remat_schedule(followed, tried).copy_to(copy.graph)
            lowered = emit(copy, setting.with_decisions(schedule=remat), chosen=chosen)
            if lowered.peak.bytes <= chosen.limit:
                break
        return Evaluation(
            candidate=candidate,
            emitted=lowered,
            peaks=(lowered.peak.bytes,),
            seconds=sum(lowered.seconds.values()),
            recompute_seconds=lowered.recompute_seconds,
        )


def _plan_within(
    joint: JointGraph, setting: Setting, budget: int | float, limit: int | None
) -> Found[Evaluation[Lowered]] | Unmet:
    """Plan for a budget, with values on the host where that saves recomputation, or where no plan fits without it.

    Args:
        joint: an annotated graph, which is not cut.
        setting: what else there is to know.
        budget: bytes or a share.
        limit: where one operation alone needs more bytes, no plan is searched for; ``None``: one always is.
    """
    runs = setting.context.runs_programs
    wanted = runs and is_host_requested(joint, setting.device.type)
    tier = make_host_tier(joint, setting)
    on_host = copy_uncut(joint) if tier is not None else None
    graph = CutProgram.of(cut_graph(joint, setting), setting)
    operations = graph.operations
    if limit is not None and not wanted:
        least = least_bytes(operations)
        if least.bytes > limit:
            return Infeasible(minimum=least.bytes, bottleneck=Bottleneck(operation=least.operation, live=least.live))
    if wanted and isinstance(budget, int):
        plans = _sample_plans(list_choices(operations, budget, setting.share, graph.whole), _EMITTED)
        return first_found(_judge_by_limit(graph.evaluate(Candidate(chosen))) for chosen in plans)
    coarse = _plan_without_host(graph, budget)
    if isinstance(setting.compiler, Inductor) and runs and budget != 0.0:
        coarse = _improve_recomputation(graph, coarse) or coarse
    if on_host is None or tier is None:
        return coarse
    return prefer_finer_stages(coarse, lambda: _improve_by_offloading(on_host, graph, coarse, tier))


def _plan_without_host(graph: CutProgram, budget: int | float) -> Found[Evaluation[Lowered]] | Unmet:
    """Plan for a budget. A plan whose emitted programs are simulated to exceed it is not used.

    Args:
        graph: for which plans are made.
        budget: bytes or a share.
    """
    margin = 0
    emitted: list[tuple[SimulatedSchedule, int]] = []
    while True:
        chosen = choose(graph.operations, budget, graph.setting.share, margin, graph.whole, emitted)
        evaluation = graph.evaluate(Candidate(chosen))
        excess = evaluation.peak - chosen.limit
        if excess <= 0 or not chosen.fits:
            return _judge_by_limit(evaluation)
        emitted.append((chosen.candidate, evaluation.peak))
        log.info(_REPLANNING, excess)
        margin += excess


def _improve_recomputation(
    graph: CutProgram, coarse: Found[Evaluation[Lowered]] | Unmet
) -> Found[Evaluation[Lowered]] | None:
    """A plan that recomputes less than one that was chosen by its operations, or fits where none of these does.

    The programs of stages that a compiler fuses save less than was planned (``passes/fused_recompute.py``).

    Args:
        graph: for which plans are made.
        coarse: the plan, or what it needs at the least.

    Returns:
        the plan; ``None``: there is none.
    """
    if isinstance(coarse, Found) and not coarse.value.recompute_seconds:
        return None
    plans = _list_less_recomputed(graph, coarse)
    low, high, best = 0, len(plans), None
    while low < high:
        middle = (low + high) // 2
        tried = _judge_by_limit(graph.evaluate(Candidate(plans[middle])))
        if isinstance(tried, Found):
            high, best = middle, tried
        else:
            low = middle + 1
    return best


def _list_less_recomputed(graph: CutProgram, coarse: Found[Evaluation[Lowered]] | Unmet) -> list[Chosen]:
    """The schedules that recompute less than that of a plan; all of them where none fits. The least recomputation is
    first.

    Args:
        graph: for which schedules are searched for.
        coarse: the plan, or what it needs at the least.
    """
    chosen = _chosen_schedule(coarse)
    plans = list_choices(graph.operations, chosen.limit, 1.0, graph.whole)
    if isinstance(coarse, Infeasible):
        return plans
    return [plan for plan in plans if plan.candidate.seconds < chosen.candidate.seconds]


def _chosen_schedule(coarse: Found[Evaluation[Lowered]] | Unmet) -> Chosen:
    chosen = coarse.value.candidate.saved if isinstance(coarse, Found) else coarse.bottleneck.chosen
    assert isinstance(chosen, Chosen)
    return chosen


def _improve_by_offloading(
    joint: JointGraph, graph: CutProgram, coarse: Found[Evaluation[Lowered]] | Unmet, tier: HostTier
) -> Found[Evaluation[Lowered]] | Unmet | None:
    """A plan that recomputes less than one without values on the host, or fits where none does without.

    Args:
        joint: the graph, which is not cut.
        graph: the same, cut, for which the plan without was made.
        coarse: that plan, or what it needs at the least.
        tier: the host.

    Returns:
        the plan, or what needs least of those that were tried; ``None``: there is nothing to try.
    """
    if graph.setting.options.stages == "auto":
        # Copies begin and end between stages, and a heavy one, as a loss head, would have all others be as heavy.
        fine = graph.setting.with_decisions(stage_starts=choose_stage_starts(len(graph.joint.segments)))
        graph = CutProgram.of(cut_graph(joint, fine), fine)
    graph = dataclasses.replace(graph, setting=dataclasses.replace(graph.setting, host_limit=tier.host_limit))
    chosen = _chosen_schedule(coarse)
    chosen = dataclasses.replace(chosen, graph=graph.operations, followed=graph.operations)
    by_chain = plan_with_host(graph.operations, chosen, tier, graph.evaluate)
    results = [] if by_chain is None else [_judge_by_limit(by_chain)]
    most = math.inf if by_chain is None or by_chain.peak > chosen.limit else by_chain.recompute_seconds
    plans = [
        plan
        for plan in _sample_plans(_list_less_recomputed(graph, coarse), TRIED)
        # No plan's peak falls by more than the bytes that leave.
        if plan.candidate.peak.bytes - tier.most <= plan.limit and plan.candidate.seconds < most
    ]
    if plans:
        results.insert(0, _judge_by_limit(find_first_fitting(plans, graph.evaluate, tier.host_limit)))
    return first_found(results) if results else None


def plan_by_rotor(joint: JointGraph, setting: Setting) -> Result[Lowered]:
    """Plan as rotor's algorithms do, for the limit that the user gave them.

    Args:
        joint: an annotated graph, which is not cut.
        setting: what else there is to know.
    """
    rotor, graph = setting.options.rotor, CutProgram.of(cut_graph(joint, setting), setting)
    assert rotor is not None
    limit, margin, operations = int(rotor.limit * setting.share), 0, graph.operations
    while True:
        fitted = fit_sequence(operations, limit - margin, rotor.slots, rotor.algo, rotor.loss_temporary)
        if isinstance(fitted, Infeasible):
            return fitted
        candidate = fitted.value.candidate
        frontier = ((candidate.peak.bytes, candidate.seconds),)
        chosen = Chosen(candidate=candidate, limit=limit, graph=operations, frontier=frontier, followed=operations)
        evaluation = graph.evaluate(Candidate(chosen))
        excess = evaluation.peak - limit
        if excess <= 0:
            return Found(evaluation.emitted)
        log.info(_REPLANNING, excess)
        margin += excess


def _judge_by_limit(evaluation: Evaluation[Lowered]) -> Found[Evaluation[Lowered]] | Unmet:
    """Judge a plan by the programs that were emitted for it."""
    chosen = evaluation.candidate.saved
    assert isinstance(chosen, Chosen)
    return Found(evaluation) if evaluation.peak <= chosen.limit else find_bottleneck(chosen, evaluation.peak)


PROGRAMS: Space[Evaluation[Lowered]] = Space(planned=_plan_within, tier=make_host_tier)
"""Plans for one device."""

_EMITTED = 24
"""Plans that are emitted at most, where it is known only then what they need."""


def _sample_plans(plans: Sequence[Chosen], count: int) -> list[Chosen]:
    """The first, the last, and some between them."""
    last = len(plans) - 1
    return [plans[position] for position in sorted({round(last * part / (count - 1)) for part in range(count)})]
