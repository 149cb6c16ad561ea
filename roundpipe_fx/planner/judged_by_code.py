"""Plans for stages that Inductor compiles, judged by the code that it writes for them.

Simulated operation by operation, a program of such stages needs too much: values that kernels compute and read inside
count in full, and results overwrite nothing. The code says what is really allocated
(:mod:`roundpipe_fx.analysis.wrapper_memory`), but writing it takes a while, so few plans are judged by it. The
planner's schedules are in order of what they recompute, and their peaks fall in that order; between two that were
judged, a peak is estimated from what the operations need::

    schedules           1     2     3     4     5     6          limit 5
    operations need     9     8     7     6     5     4          5 is the first within the limit by these
    the code needs                            [3.3]              so others are estimated to need 0.66 times as much
    the code needs     [6.0]                                     estimated 5.9: it recomputes nothing, and is judged
    estimated                 5.3   4.7   4.0
    the code needs                 [4.8]                         fits; for 2, 5.4 is estimated: 3 is taken
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

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
    operations = [plan.candidate.peak.bytes for plan in plans]
    last = len(plans) - 1

    @functools.cache
    def judged(place: int) -> Evaluation[Lowered]:
        chosen = dataclasses.replace(plans[place], limit=max(plans[place].limit, operations[place]))
        return _judged(graph.evaluate(Candidate(chosen)))

    def peak(place: int) -> int:
        return judged(place).peak

    if isinstance(budget, int):
        known: dict[int, int] = {}
        limit = int(budget * setting.share)
        first = next((place for place in range(last) if operations[place] <= limit), last)
    else:
        known = {place: peak(place) for place in ({last} if budget == 0.0 else {0, last})}
        limit = int(limit_of(budget, min(known.values()), max(known.values())) * setting.share)
        first = 0 if budget == 1.0 else last
    place = least_recomputed(operations, peak, limit, first, known)
    if place is None and isinstance(budget, int):
        # The last schedule is judged for any budget that no other one keeps, so what it needs is always named.
        return _unmet(dataclasses.replace(plans[last], limit=limit), peak(last), budget)
    return Found(_for_limit(judged(last), peak(last)) if place is None else _for_limit(judged(place), limit))


def least_recomputed(
    operations: Sequence[int], judge: Callable[[int], int], limit: int, first: int, judged: Mapping[int, int]
) -> int | None:
    """The first schedule whose code is within a limit, as far as a few that are judged say.

    Args:
        operations: bytes of each schedule's operations, the least recomputation first.
        judge: gives the bytes of a schedule's code.
        limit: bytes.
        first: the schedule that is judged first.
        judged: bytes of the code of schedules that are known.

    Returns:
        its number; ``None``: those that were judged, the last one among them, need more.
    """
    known = dict(judged)
    tried = first
    for _ in range(_JUDGED):
        known[tried] = judge(tried)
        above = max((place for place, size in known.items() if size > limit), default=-1)
        best = min((place for place, size in known.items() if size <= limit and place > above), default=None)
        end = len(operations) if best is None else best
        rest = [place for place in range(above + 1, end) if place not in known]
        if not rest:
            break
        allowed = (_VERY_ROUGHLY if not place else _ROUGHLY for place in rest)
        expected = (_expected(operations, known, place) for place in rest)
        within = (size <= most * limit for size, most in zip(expected, allowed, strict=True))
        close = next(itertools.compress(rest, within), None)
        if close is None and best is not None:
            break
        tried = rest[-1] if close is None else close
    if all(size > limit for size in known.values()):
        known[len(operations) - 1] = judge(len(operations) - 1)
    return min((place for place, size in known.items() if size <= limit), default=None)


def _expected(operations: Sequence[int], known: Mapping[int, int], place: int) -> float:
    """Bytes of a schedule's code, estimated from those that are known on either side, or on one."""
    earlier = max((other for other in known if other < place), default=None)
    later = min((other for other in known if other > place), default=None)
    if earlier is None or later is None:
        near = later if earlier is None else earlier
        assert near is not None
        return known[near] * operations[place] / operations[near]
    high, low = operations[earlier], operations[later]
    part = (operations[place] - low) / (high - low) if high > low else 0.0
    return known[later] + part * (known[earlier] - known[later])


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
