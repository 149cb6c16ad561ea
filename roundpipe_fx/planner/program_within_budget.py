"""Planning within a budget: the plan that recomputes least of those whose emitted programs stay within it."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.budget import Found, Infeasible, Result, first_found
from roundpipe_fx.compiler.emit import emit, full_of
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.operations_in_tiles import (
    cut,
    operations_of,
    uncut,
    with_gradients,
    without_common_subexpressions,
)
from roundpipe_fx.compiler.overlap import stages_to_overlap
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.compiler.values_on_host import wants_host
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.passes.entry import PassLevel
from roundpipe_fx.planner.with_host import TRIED, has_host, host_room, least_recomputed, stage_starts
from roundpipe_fx.remat.choose import Bottleneck, Chosen, Unmet, choices, choose, unmet_by
from roundpipe_fx.remat.early import early_within
from roundpipe_fx.remat.follow_sequence import fit_sequence
from roundpipe_fx.remat.least_bytes import least_bytes
from roundpipe_fx.remat.schedule import remat_schedule
from roundpipe_fx.remat.search import Candidate

__all__ = ["following_rotor", "within"]

log = logging.getLogger(__name__)

_REPLANNING = "the programs exceed the budget by %d bytes more than was planned; replanning"


@dataclass(frozen=True, kw_only=True)
class _CutGraph:
    """A graph that is cut into stages, for which plans are made.

    Attributes:
        joint: the graph.
        shared: the same with equal values shared; ``None``: there are none.
        operations: of the graph.
        whole: of ``shared``.
        setting: what else there is to know.
    """

    joint: JointGraph
    shared: JointGraph | None
    operations: OperationGraph
    whole: OperationGraph | None
    setting: Setting

    @classmethod
    def of(cls, joint: JointGraph, setting: Setting) -> _CutGraph:
        """That of a graph with segments."""
        step = with_gradients(setting.step, joint)
        shared = without_common_subexpressions(joint, setting) if setting.options.rotor is None else None
        joint = setting.run(joint, PassLevel.STAGED)
        operations = dataclasses.replace(operations_of(joint, setting), step=step)
        whole = None if shared is None else dataclasses.replace(operations_of(shared, setting), step=step)
        return cls(joint=joint, shared=shared, operations=operations, whole=whole, setting=setting)

    @functools.cached_property
    def beside(self) -> Any:
        """What the early part of recomputations may run beside."""
        return stages_to_overlap(self.joint, full_of(self.setting))

    def emitted(self, chosen: Chosen, sent: int = 0) -> Lowered:
        """Emitted as chosen. Programs may need a little more than was planned: then nothing is early.

        Args:
            chosen: the plan.
            sent: bytes of values that leave for the host, if as many have the time.
        """
        followed, schedule = chosen.followed, chosen.candidate.schedule
        early = early_within(followed, schedule, self.beside)
        setting = dataclasses.replace(self.setting, sent=sent)
        for tried in (schedule,) if early is schedule else (early, schedule):
            copy = (self.joint if followed is not self.whole or self.shared is None else self.shared).copy()
            remat = remat_schedule(followed, tried).on(copy.graph)
            lowered = emit(copy, setting.knowing(schedule=remat), chosen=chosen)
            if lowered.peak.bytes <= chosen.limit:
                break
        return lowered


def within(joint: JointGraph, setting: Setting, budget: int | float, limit: int | None) -> Found[Lowered] | Unmet:
    """Plan for a budget, with values on the host where that saves recomputation, or where no plan fits without it.

    Args:
        joint: an annotated graph, which is not cut.
        setting: what else there is to know.
        budget: bytes or a share.
        limit: where one operation alone needs more bytes, no plan is searched for; ``None``: one always is.
    """
    options, runs = setting.options, setting.context.runs_programs
    wanted = runs and wants_host(joint, setting.device.type)
    room = host_room(options.host_budget, on_paper=options.device_name is not None)
    on_host = None
    if runs and room and not wanted and setting.step is None and has_host(setting.device):
        on_host = uncut(joint)
    graph = _CutGraph.of(cut(joint, setting), setting)
    operations = graph.operations
    if limit is not None and not wanted:
        least = least_bytes(operations)
        if least.bytes > limit:
            return Infeasible(minimum=least.bytes, bottleneck=Bottleneck(operation=least.operation, live=least.live))
    if wanted and isinstance(budget, int):
        plans = _some_of(choices(operations, budget, setting.share, graph.whole), _EMITTED)
        return first_found(_within_limit(graph.emitted(chosen), chosen) for chosen in plans)
    without = _without_host(graph, budget)
    if on_host is None or (isinstance(without, Found) and not without.value.recompute_seconds):
        return without
    return _with_host(on_host, graph, without, room) or without


def _with_host(
    joint: JointGraph, graph: _CutGraph, without: Found[Lowered] | Unmet, room: int
) -> Found[Lowered] | Unmet | None:
    """A plan that recomputes less than one without values on the host, or fits where none does without.

    Args:
        joint: the graph, which is not cut.
        graph: the same, cut, for which the plan without was made.
        without: that plan, or what it needs at the least.
        room: bytes of values that may be on the host.

    Returns:
        the plan. If none fits without and none with values on the host, what these need, if it is less; else ``None``.
    """
    chosen = without.value.chosen if isinstance(without, Found) else without.bottleneck.chosen
    assert isinstance(chosen, Chosen)
    if graph.setting.options.stages == "auto":
        # Copies begin and end between stages, and a heavy one, as a loss head, would have all others be as heavy.
        fine = graph.setting.knowing(stage_starts=stage_starts(len(graph.joint.segments)))
        graph = _CutGraph.of(cut(joint, fine), fine)
    graph = dataclasses.replace(graph, setting=dataclasses.replace(graph.setting, room=room))
    plans = choices(graph.operations, chosen.limit, 1.0, graph.whole)
    if isinstance(without, Found):
        plans = [plan for plan in plans if plan.candidate.seconds < chosen.candidate.seconds]
    if not plans:
        return None
    lowered, plan = least_recomputed(_some_of(plans, TRIED), graph.emitted, room)
    if lowered.peak.bytes <= chosen.limit:
        return Found(lowered)
    if isinstance(without, Infeasible) and lowered.peak.bytes < without.minimum:
        return unmet_by(plan, lowered.peak.bytes)
    return None


def _without_host(graph: _CutGraph, budget: int | float) -> Found[Lowered] | Unmet:
    """Plan for a budget. A plan whose emitted programs are simulated to exceed it is not used.

    Args:
        graph: for which plans are made.
        budget: bytes or a share.
    """
    margin = 0
    emitted: list[tuple[Candidate, int]] = []
    while True:
        chosen = choose(graph.operations, budget, graph.setting.share, margin, graph.whole, emitted)
        lowered = graph.emitted(chosen)
        excess = lowered.peak.bytes - chosen.limit
        if excess <= 0 or not chosen.fits:
            return _within_limit(lowered, chosen)
        emitted.append((chosen.candidate, lowered.peak.bytes))
        log.info(_REPLANNING, excess)
        margin += excess


def following_rotor(joint: JointGraph, setting: Setting) -> Result[Lowered]:
    """Plan as rotor's algorithms do, for the limit that the user gave them.

    Args:
        joint: an annotated graph, which is not cut.
        setting: what else there is to know.
    """
    rotor, graph = setting.options.rotor, _CutGraph.of(cut(joint, setting), setting)
    assert rotor is not None
    limit, margin, operations = int(rotor.limit * setting.share), 0, graph.operations
    while True:
        fitted = fit_sequence(operations, limit - margin, rotor.slots, rotor.algo, rotor.loss_temporary)
        if isinstance(fitted, Infeasible):
            return fitted
        candidate = fitted.value.candidate
        frontier = ((candidate.peak.bytes, candidate.seconds),)
        lowered = graph.emitted(
            Chosen(candidate=candidate, limit=limit, graph=operations, frontier=frontier, followed=operations)
        )
        excess = lowered.peak.bytes - limit
        if excess <= 0:
            return Found(lowered)
        log.info(_REPLANNING, excess)
        margin += excess


def _within_limit(lowered: Lowered, chosen: Chosen) -> Found[Lowered] | Unmet:
    """Judge a plan by the programs that were emitted for it."""
    return Found(lowered) if lowered.peak.bytes <= chosen.limit else unmet_by(chosen, lowered.peak.bytes)


_EMITTED = 24
"""Plans that are emitted at most, where it is known only then what they need."""


def _some_of(plans: Sequence[Chosen], count: int) -> list[Chosen]:
    """The first, the last, and some between them."""
    last = len(plans) - 1
    return [plans[place] for place in sorted({round(last * part / (count - 1)) for part in range(count)})]
