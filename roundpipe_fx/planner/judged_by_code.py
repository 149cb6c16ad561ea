"""Plans for stages compiled by Inductor, judged by the memory of the code that Inductor writes.

The code shows the real allocations (:mod:`roundpipe_fx.analysis.wrapper_memory`), but writing it takes seconds, so only
a few plans are judged by it. All are compared by an estimate (:mod:`roundpipe_fx.analysis.fused_memory`). Operations
one by one would not do: a schedule that recomputes a long chain at once may need less of these, and more of the code.
What the code needs more than was estimated varies little, so it is interpolated between judged schedules::

    schedules           1     2     3     4     5     6          limit 5
    estimated          6.5   5.9   4.9   5.2   4.6   4.0         3 is the first within the limit
    the code needs                [5.1]                          so others are expected to need 0.2 more
    expected           6.7   6.1         5.4   4.8   4.2         5 is the first within the limit by these
    the code needs                             [4.9]             taken: none before it is expected to fit
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from roundpipe_fx.analysis.fused_memory import follow_fused
from roundpipe_fx.budget import Found, Infeasible, first_found, limit_of
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.operations_in_tiles import copy_uncut, cut_graph, with_fewest_stages
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.options import Inductor
from roundpipe_fx.planner.crossed_schedules import cross_at_peak
from roundpipe_fx.planner.evaluation import Candidate, Evaluation
from roundpipe_fx.planner.program_within_budget import PROGRAMS, CutProgram
from roundpipe_fx.planner.search import search
from roundpipe_fx.planner.with_host import has_host
from roundpipe_fx.remat.choose import Chosen, Unmet, find_bottleneck, list_choices, write_refusal
from roundpipe_fx.runtime.compiled_memory import follow_compiled

_JUDGED = 3
"""Schedules that are judged for a budget, at most, beside the ends of a share and the last one."""
_CAUTIOUS = 0.99
"""Once a schedule needed more than was expected, the next is one that is expected to need at most so much of the limit.
"""
_SAMPLED = 16
"""Schedules whose code is estimated, at most, before the bisection between two of them."""


def can_read_code(setting: Setting) -> bool:
    """Test for stages whose code Inductor can write here, on the device that they are compiled for."""
    there = setting.device.type == "cpu" or torch.cuda.is_available()
    return isinstance(setting.compiler, Inductor) and there


def judge_by_code(lowered: Lowered) -> Lowered:
    """Replace the peak of programs by that of their stages' code."""
    compiler = lowered.setting.compiler
    options = compiler.options if isinstance(compiler, Inductor) else ()
    return lowered.judge_by(functools.partial(follow_compiled, beyond=lowered.setting.beyond_plan, options=options))


def plan_by_code(joint: JointGraph, budget: int | float, setting: Setting) -> Found[Evaluation[Lowered]] | Unmet:
    """The schedule that recomputes least of those whose code stays within a budget.

    Args:
        joint: an annotated graph, which is not cut.
        budget: bytes, or a share of the way from the peak of the planner's last schedule to that of its first.
        setting: what else there is to know.
    """
    original = copy_uncut(joint)
    graph = CutProgram.of(cut_graph(joint, setting), setting)
    plans = list_choices(graph.operations, budget, 1.0, graph.whole)
    # By the identity of a schedule, which is held so that no other one gets it.
    emitted: dict[int, tuple[Chosen, Evaluation[Lowered]]] = {}

    def emit(plan: Chosen) -> Evaluation[Lowered]:
        if id(plan) not in emitted:
            emitted[id(plan)] = plan, _emit(plan, graph, original, setting)
        return emitted[id(plan)][1]

    def estimate(plan: Chosen) -> int:
        return emit(plan).emitted.judge_by(follow_fused).peak.bytes

    if budget != 1.0:
        plans = cross_at_peak(plans, estimate)
    last = len(plans) - 1

    @functools.cache
    def judged(position: int) -> Evaluation[Lowered]:
        return _judge(emit(plans[position]))

    @functools.cache
    def estimated(position: int) -> int:
        return estimate(plans[position])

    def peak(position: int) -> int:
        return judged(position).peak

    # Numbers of plans in order of recomputation; `known` are those whose code was read.
    known: dict[int, int] = {}
    if isinstance(budget, int):
        limit = int(budget * setting.share)
        within = _find_first_within(range(len(plans)), estimated, limit)
        first = last if within is None else within
    else:
        ends = {0.0: {last}, 1.0: {0}}.get(budget, {0, last})
        known = {position: peak(position) for position in ends}
        limit = int(limit_of(budget, min(known.values()), max(known.values())) * setting.share)
        first = 0 if budget == 1.0 else last
    position = find_least_recomputed(len(plans), estimated, peak, limit, first, known)
    if position is None and isinstance(budget, int):
        # The last schedule is judged for any budget that no other one keeps, so what it needs is always named.
        return _make_refusal(dataclasses.replace(plans[last], limit=limit), peak(last), budget)
    return Found(
        _as_budget_in_bytes(judged(last), peak(last))
        if position is None
        else _as_budget_in_bytes(judged(position), limit)
    )


def _emit(plan: Chosen, program: CutProgram, original: JointGraph, setting: Setting) -> Evaluation[Lowered]:
    """The programs of a schedule; of one that recomputes nothing, in as few stages as compiling gains."""
    if not plan.candidate.seconds:
        longest = with_fewest_stages(setting)
        of_plan = program
        program = CutProgram.of(cut_graph(original.copy(), longest), longest)
        followed = program.operations if plan.followed is of_plan.operations else program.whole
        assert followed is not None
        plan = dataclasses.replace(plan, graph=program.operations, followed=followed)
    chosen = dataclasses.replace(plan, limit=max(plan.limit, plan.candidate.peak.bytes))
    return program.evaluate(Candidate(chosen))


def find_least_recomputed(
    count: int,
    estimated: Callable[[int], int],
    judge: Callable[[int], int],
    limit: int,
    first: int,
    judged: Mapping[int, int],
) -> int | None:
    """Find the first schedule whose code is expected to be within a limit, judging only a few.

    Args:
        count: of schedules, the least recomputation first.
        estimated: gives the bytes that a schedule's code is estimated to need.
        judge: gives the bytes of a schedule's code.
        limit: bytes that the code of a plan may allocate.
        first: the schedule that is judged first.
        judged: bytes of the code of schedules that are known.

    Returns:
        its number; ``None``: those that were judged, the last one among them, need more.
    """
    known = dict(judged)
    tried, most = first, float(limit)
    # Every round compiles one plan: the first one that is expected to be within the limit.
    for number in range(_JUDGED):
        if tried not in known:
            known[tried] = judge(tried)
        # An expectation that was wrong: the next ones are a little more careful.
        if number and known[tried] > limit:
            most = _CAUTIOUS * limit
        best = min((position for position, size in known.items() if size <= limit), default=count)
        rest = [position for position in range(best) if position not in known]
        if not rest:
            break
        expected = functools.partial(_expect, estimated, known)
        close = _find_first_within(rest, expected, most)
        if close is None:
            break
        tried = close
    if all(size > limit for size in known.values()):
        known[count - 1] = judge(count - 1)
    return min((position for position, size in known.items() if size <= limit), default=None)


def _find_first_within(positions: Sequence[int], needs: Callable[[int], float], limit: float) -> int | None:
    """The first position at which no more is needed than a limit: of a sample, then by bisection before it."""
    # Needs fall only roughly, so a bisection of all could end after a rise that hides better ones.
    step = -(-len(positions) // _SAMPLED)
    for end in range(len(positions) - 1, -1, -step)[::-1]:
        if needs(positions[end]) <= limit:
            start = max(end - step + 1, 0)
            number = bisect.bisect_left(positions, True, start, end, key=lambda position: needs(position) <= limit)
            return positions[number]
    return None


def _expect(estimated: Callable[[int], int], known: Mapping[int, int], position: int) -> float:
    """Bytes of a schedule's code, estimated and corrected by those that are known on either side, or on one."""
    earlier = max((other for other in known if other < position), default=None)
    later = min((other for other in known if other > position), default=None)
    near = [(estimated(other), known[other]) for other in (later, earlier) if other is not None]
    (low, code), (high, code_of_high) = near[0], near[-1]
    # Between two judged plans the correction is linear in the estimates.
    part = min(max((estimated(position) - low) / (high - low), 0.0), 1.0) if high > low else 0.0
    correction = (1 - part) * (code - low) + part * (code_of_high - high)
    return estimated(position) + correction


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
    return min(plain, other, key=lambda result: result.value.seconds)


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
        evaluation = _judge(result.value)
        excess = evaluation.peak - limit
        if excess <= 0:
            return Found(_as_budget_in_bytes(evaluation, limit))
        asked = max(math.floor(asked - excess / setting.share), 1)
    if isinstance(result, Found):
        result = search(joint, 1, setting, PROGRAMS)
        assert isinstance(result, Infeasible)
    result = search(joint, math.ceil(result.minimum / setting.share), setting, PROGRAMS)
    if isinstance(result, Infeasible):
        return result
    evaluation = _judge(result.value)
    if evaluation.peak <= limit:
        return Found(_as_budget_in_bytes(evaluation, limit))
    chosen = evaluation.emitted.chosen
    assert isinstance(chosen, Chosen)
    return _make_refusal(dataclasses.replace(chosen, limit=limit), evaluation.peak, budget)


def _judge(evaluation: Evaluation[Lowered]) -> Evaluation[Lowered]:
    lowered = judge_by_code(evaluation.emitted)
    return dataclasses.replace(evaluation, emitted=lowered, peaks=(lowered.peak.bytes,))


def _as_budget_in_bytes(evaluation: Evaluation[Lowered], limit: int) -> Evaluation[Lowered]:
    """The same plan, of a budget in bytes."""
    chosen = evaluation.emitted.chosen
    assert isinstance(chosen, Chosen)
    lowered = dataclasses.replace(evaluation.emitted, chosen=dataclasses.replace(chosen, limit=limit))
    return dataclasses.replace(evaluation, emitted=lowered)


def _make_refusal(chosen: Chosen, minimum: int, budget: int | float) -> Unmet:
    unmet = find_bottleneck(chosen, minimum)
    text = write_refusal(chosen, minimum, budget)
    return dataclasses.replace(unmet, bottleneck=dataclasses.replace(unmet.bottleneck, text=text))
