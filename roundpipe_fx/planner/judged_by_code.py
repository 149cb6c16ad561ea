"""Plans for stages that Inductor compiles, judged by the code that it writes for them.

Simulated operation by operation, a program of such stages needs too much: values that kernels compute and read inside
count in full, and results overwrite nothing. The code says what is really allocated
(:mod:`roundpipe_fx.analysis.wrapper_memory`), but writing it takes a while, so few plans are judged by it. The
planner's schedules are in order of what they recompute, and their peaks fall in that order; between two that were
judged, a peak is estimated from what the operations need::

    schedules           1     2     3     4     5     6          limit 5
    operations need     9     8     7     6     5     4
    the code needs                                   [2.6]       fits: 4 × 0.65
    estimated           5.9   5.2   4.6   3.9   3.3
    the code needs                 [4.7]                         fits; of 2, 5.4 is estimated: 3 is taken
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch

from roundpipe_fx.budget import Found, Infeasible, first_found, limit_of
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.operations_in_tiles import cut
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.options import Inductor
from roundpipe_fx.planner.evaluation import Candidate, Evaluation
from roundpipe_fx.planner.program_within_budget import PROGRAMS, CutProgram
from roundpipe_fx.planner.search import search
from roundpipe_fx.planner.with_host import has_host
from roundpipe_fx.remat.choose import Chosen, Unmet, choices, refusal, unmet_by
from roundpipe_fx.runtime.compiled_memory import follow_compiled

_JUDGED = 5
"""Schedules that are judged for a budget, at most, beside the ends of a share and the last one."""
_ROUGHLY = 1.03
"""A schedule is judged if it is estimated to need at most so many times the limit."""
_VERY_ROUGHLY = 1.25
"""The same for the first one, from which on others are estimated better."""


def has_code(setting: Setting) -> bool:
    """Test for stages whose code Inductor can write here, on the device that they are compiled for."""
    there = setting.device.type == "cpu" or torch.cuda.is_available()
    return isinstance(setting.compiler, Inductor) and setting.context.runs_programs and there


def by_code(lowered: Lowered) -> Lowered:
    """The same programs, whose peak is that of their stages' code."""
    compiler = lowered.setting.compiler
    options = compiler.options if isinstance(compiler, Inductor) else ()
    return lowered.followed_by(functools.partial(follow_compiled, beyond=lowered.setting.beyond_plan, options=options))


def plan_by_code(joint: JointGraph, budget: int | float, setting: Setting) -> Found[Evaluation[Lowered]] | Unmet:
    """The schedule that recomputes least of those whose code stays within a budget.

    Args:
        joint: an annotated graph, which is not cut.
        budget: bytes, or a share of the way from the peak of the planner's last schedule to that of its first.
        setting: what else there is to know.
    """
    graph = CutProgram.of(cut(joint, setting), setting)
    plans = choices(graph.operations, budget, 1.0, graph.whole)
    return _Judged(graph, plans).within(budget)


class _Judged:
    """The planner's schedules, the least recomputation first, and those that were judged.

    Args:
        graph: that they are for.
        plans: the schedules.
    """

    def __init__(self, graph: CutProgram, plans: Sequence[Chosen]) -> None:
        self._graph = graph
        self._plans = plans
        self._known: dict[int, Evaluation[Lowered]] = {}

    def within(self, budget: int | float) -> Found[Evaluation[Lowered]] | Unmet:
        """The schedule for a budget, or what is needed at the least."""
        share = self._graph.setting.share
        last = len(self._plans) - 1
        if isinstance(budget, int):
            limit = int(budget * share)
            first = next((place for place in range(last) if self._plan(place) <= limit), last)
        else:
            ends = [self._peak(place) for place in ({last} if budget == 0.0 else {0, last})]
            limit = int(limit_of(budget, min(ends), max(ends)) * share)
            first = 0 if budget == 1.0 else last
        place = self._least_recomputed(limit, first)
        if place is None:
            least = self._peak(last)  # what is judged for any budget that no other schedule keeps
            if isinstance(budget, int):
                return _unmet(dataclasses.replace(self._plans[last], limit=limit), least, budget)
            place, limit = last, least
        return Found(_for_limit(self._known[place], limit))

    def _least_recomputed(self, limit: int, first: int) -> int | None:
        """The first schedule whose code is within a limit, as far as a few that are judged say; ``None``: there is
        none.

        Args:
            limit: bytes.
            first: is judged first.
        """
        tried = first
        for _ in range(_JUDGED):
            self._peak(tried)
            fits = [place for place in self._known if self._peak(place) <= limit]
            above = max((place for place in self._known if self._peak(place) > limit), default=-1)
            best = min((place for place in fits if place > above), default=None)
            end = len(self._plans) - 1 if best is None else best - 1
            rest = [place for place in range(above + 1, end + 1) if place not in self._known]
            if not rest:
                break
            allowed = (_VERY_ROUGHLY if not place else _ROUGHLY for place in rest)
            close = (place for place, most in zip(rest, allowed, strict=True) if self._expected(place) <= most * limit)
            expected = next(close, None)
            if expected is None and best is not None:
                break
            tried = rest[-1] if expected is None else expected
        if all(self._peak(place) > limit for place in self._known):
            self._peak(len(self._plans) - 1)
        return min((place for place in self._known if self._peak(place) <= limit), default=None)

    def _peak(self, place: int) -> int:
        """Bytes of a schedule's code, which is written unless it is known."""
        if place not in self._known:
            plan = self._plans[place]
            chosen = dataclasses.replace(plan, limit=max(plan.limit, plan.candidate.peak.bytes))
            evaluation = self._graph.evaluate(Candidate(chosen))
            lowered = by_code(evaluation.emitted)
            self._known[place] = dataclasses.replace(evaluation, emitted=lowered, peaks=(lowered.peak.bytes,))
        return self._known[place].peak

    def _plan(self, place: int) -> int:
        """Bytes of a schedule's operations."""
        return self._plans[place].candidate.peak.bytes

    def _expected(self, place: int) -> float:
        """Bytes of a schedule's code, estimated from those that are known on either side, or on one."""
        earlier = max((known for known in self._known if known < place), default=None)
        later = min((known for known in self._known if known > place), default=None)
        if earlier is None or later is None:
            known = later if earlier is None else earlier
            assert known is not None
            return self._peak(known) * self._plan(place) / self._plan(known)
        high, low = self._plan(earlier), self._plan(later)
        part = (self._plan(place) - low) / (high - low) if high > low else 0.0
        return self._peak(later) + part * (self._peak(earlier) - self._peak(later))


def search_by_code(joint: JointGraph, budget: int | float, setting: Setting) -> Found[Evaluation[Lowered]] | Unmet:
    """The plan for a budget, judged by its stages' code: without tiles or values on the host if it recomputes nothing,
    or if these are not to be tried.

    Args:
        joint: an annotated graph, which is not cut.
        budget: bytes, or a share.
        setting: what else there is to know.
    """
    plain = plan_by_code(joint, budget, setting)
    limit = budget
    if isinstance(plain, Found):
        others = setting.options.tiling == "auto" or has_host(setting.device)
        if not others or not plain.value.recompute_seconds:
            return plain
        known = plain.value.emitted.budget
        assert known is not None
        limit = math.ceil(known / setting.share)
    elif setting.options.tiling == "never" and not has_host(setting.device):
        return plain
    other = _search_others(joint, limit, setting)
    if isinstance(other, Infeasible) or isinstance(plain, Infeasible):
        return first_found((plain, other))
    return min(plain, other, key=lambda one: one.value.seconds)


def _search_others(joint: JointGraph, budget: int | float, setting: Setting) -> Found[Evaluation[Lowered]] | Unmet:
    """The plan in tiles, or with values on the host, that is within a budget by its operations and by its code.

    If there is none, the plan with the least bytes by its operations is judged: what it needs is the least budget.
    """
    assert isinstance(budget, int)
    limit, asked = int(budget * setting.share), budget
    for _ in range(_JUDGED):
        result = search(joint, asked, setting, PROGRAMS)
        if isinstance(result, Infeasible):
            break
        evaluation = _judged(result.value)
        excess = evaluation.peak - limit
        if excess <= 0:
            return Found(_for_limit(evaluation, limit))
        asked = max(math.floor(asked - excess / setting.share), 1)
    if isinstance(result, Found):
        result = search(joint, 1, setting, PROGRAMS)
        assert isinstance(result, Infeasible)
    result = search(joint, math.ceil(result.minimum / setting.share), setting, PROGRAMS)
    if isinstance(result, Infeasible):
        return result
    evaluation = _judged(result.value)
    if evaluation.peak <= limit:
        return Found(_for_limit(evaluation, limit))
    chosen = evaluation.emitted.chosen
    assert isinstance(chosen, Chosen)
    return _unmet(dataclasses.replace(chosen, limit=limit), evaluation.peak, budget)


def _judged(evaluation: Evaluation[Lowered]) -> Evaluation[Lowered]:
    lowered = by_code(evaluation.emitted)
    return dataclasses.replace(evaluation, emitted=lowered, peaks=(lowered.peak.bytes,))


def _for_limit(evaluation: Evaluation[Lowered], limit: int) -> Evaluation[Lowered]:
    """The same plan, of a budget in bytes."""
    chosen = evaluation.emitted.chosen
    assert isinstance(chosen, Chosen)
    lowered = dataclasses.replace(evaluation.emitted, chosen=dataclasses.replace(chosen, limit=limit))
    return dataclasses.replace(evaluation, emitted=lowered)


def _unmet(chosen: Chosen, minimum: int, budget: int | float) -> Unmet:
    unmet = unmet_by(chosen, minimum)
    text = refusal(chosen, minimum, budget)
    return dataclasses.replace(unmet, bottleneck=dataclasses.replace(unmet.bottleneck, text=text))
