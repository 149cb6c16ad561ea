"""Within a budget: a pipeline that recomputes little, with no device above its bytes.

What a device holds depends on how many microbatches are in flight there, so each run of segments whose values lie on
the same devices has its own ways of keeping less (:mod:`roundpipe_fx.remat.in_flight`). How many bytes devices need
is not known before modules are emitted and the schedule is simulated. They fall as less is kept, so plans are found by
bisection: first with all devices equally thrifty, then each for itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from roundpipe_fx.budget import InfeasibleBudgetError, bytes_text, limit_of, share_hint
from roundpipe_fx.compiler.lower import emit, emit_by_policy, operations_of
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline, Structure, variant_of
from roundpipe_fx.pipeline.runs import runs_of
from roundpipe_fx.pipeline.settings import Pipelining
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.choose import Chosen
from roundpipe_fx.remat.early import EarlyChoices, early_at, early_choices
from roundpipe_fx.remat.in_flight import SegmentRun, points_of_run, together
from roundpipe_fx.remat.save_policy import SavePolicy
from roundpipe_fx.remat.schedule import RematChoice, remat_schedule
from roundpipe_fx.remat.search import Candidate, ParetoPoint, everything_kept, most_kept, work_out
from roundpipe_fx.remat.segment_chain import chain_of
from roundpipe_fx.schedules import ActionKind, Schedule, StageGraph, StepCosts, Timing

__all__ = ["within_budget"]


def within_budget(
    joint: JointGraph,
    setting: Setting,
    split: bool,
    structure: Structure,
    given: Schedule | None,
    pipelining: Pipelining,
    forwards_before_backwards: bool,
    budget: int | float,
    stage_inputs: SavePolicy,
) -> LoweredPipeline:
    """The quickest step that is found with every device within the budget.

    Args:
        joint: a graph with stages.
        setting: what emission knows beside it.
        split: whether gradients of parameters are made in modules of their own.
        structure: how the graph was cut.
        given: the user's schedule.
        pipelining: the user's.
        forwards_before_backwards: whether all forwards run before all backwards.
        budget: bytes a device, or a share of the way from the least that can be reached to keeping everything.
        stage_inputs: says what enters stages: keeping that alone is always one of the possibilities.

    Raises:
        InfeasibleBudgetError: some device needs more than the budget at the least.
    """
    blocks = Blocks(operations_of(joint, setting, sums=pipelining.microbatches > 1))

    def attempted(lowered: Lowered, chosen: Chosen | None = None) -> _Attempt:
        only = variant_of(lowered, setting, pipelining)
        pipeline = LoweredPipeline(
            main=only,
            last=only,
            structure=structure,
            given=given,
            devices=pipelining.workers,
            forwards_before_backwards=forwards_before_backwards,
        )
        return _Attempt(pipeline, pipeline.predict(pipelining.microbatches), chosen)

    def with_schedule(candidate: Candidate) -> _Attempt:
        own = joint.copy()
        remat = remat_schedule(blocks.graph, candidate.schedule).on(own.graph)
        chosen = Chosen(
            candidate=candidate, limit=candidate.peak.bytes, graph=blocks.graph, frontier=(), followed=blocks.graph
        )
        known = setting.knowing(schedule=remat)
        return attempted(emit(own, known, chosen=chosen, split=split, sums=True), chosen)

    made: list[tuple[RematChoice, _Attempt]] = []

    def attempt(choice: RematChoice) -> _Attempt:
        same = [own for other, own in made if other == choice]  # levels that differ often keep the same
        if not same:
            same = [with_schedule(work_out(blocks, choice))]
            made.append((choice, same[0]))
        return same[0]

    chain, save_options = chain_of(blocks)
    kept = most_kept(blocks, save_options) if blocks.graph.regions else everything_kept(blocks)
    first = attempt(kept.schedule.choice)
    allowed = budget if isinstance(budget, int) else None
    limit = int((first.peak if allowed is None else allowed) * setting.share)
    if first.peak <= limit and (isinstance(budget, int) or budget == 1.0):
        return first.within(limit, allowed, [first])
    runs = runs_of(first.timing, joint.cuts)
    points = [points_of_run(blocks.graph, chain, save_options, run) for run in runs]
    tried = {(0,) * pipelining.workers: first}

    def at(levels: Sequence[int]) -> _Attempt:
        if tuple(levels) not in tried:
            tried[tuple(levels)] = attempt(_choice(levels, runs, points))
        return tried[tuple(levels)]

    lowest = max(len(own) for own in points)
    others = []
    if not blocks.graph.regions:
        others = [attempted(emit_by_policy(joint.copy(), setting, stage_inputs, split=split, sums=True))]
    level = _alike(at, lowest, pipelining.workers, limit) if isinstance(budget, int) else None
    if level is None:
        lowest = _lowest(at, lowest, pipelining.workers)
        if isinstance(budget, float):
            low = min(own.peak for own in (*(own for _, own in made), *others))
            limit = int(limit_of(budget, low, first.peak) * setting.share)
        level = _alike(at, lowest, pipelining.workers, limit)
    if level is not None and len(runs) > 1:  # with one, all devices have its level
        _each(at, level, pipelining.workers, limit)
    attempts = [*(own for _, own in made), *others]
    if isinstance(budget, float) and budget == 0.0:
        limit = min(own.peak for own in attempts)
    fitting = [own for own in attempts if own.peak <= limit]
    if not fitting:
        least = min(attempts, key=lambda own: own.peak)
        if allowed is not None and least.peak > allowed:
            raise InfeasibleBudgetError(
                f"memory_budget of {allowed} bytes ({bytes_text(allowed)}) a device cannot be met: with schedule "
                f"{structure.name!r}, {pipelining.workers} devices and {pipelining.microbatches} microbatches, the "
                f"device that needs most needs at least {least.peak} bytes ({bytes_text(least.peak)}). Use more and "
                "smaller microbatches, more devices, another schedule, or a budget of at least the minimum."
                f"{share_hint(allowed)}",
                least.peak,
            )
        fitting = [least]
    best = min(fitting, key=lambda own: (own.timing.makespan, own.seconds, own.peak))
    if pipelining.workers > 1:
        best = _with_waits_filled(best, fitting, with_schedule, split, pipelining.microbatches, limit)
    return best.within(max(limit, best.peak), allowed, attempts)


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """A pipeline, and its schedule on paper."""

    pipeline: LoweredPipeline
    timing: Timing
    chosen: Chosen | None = None
    """The plan; ``None``: a save policy's."""

    @property
    def peak(self) -> int:
        """Bytes of the device that needs most."""
        return max(self.timing.peak_bytes)

    @property
    def seconds(self) -> float:
        """Modelled seconds of recomputation, for a microbatch."""
        return self.pipeline.main.lowered.recompute_seconds

    def within(self, budget: int, allowed: int | None, attempts: Sequence[_Attempt]) -> LoweredPipeline:
        """The pipeline, chosen among several for a budget."""
        found: list[tuple[int, float]] = []
        for seconds, peak in sorted((own.seconds, own.peak) for own in attempts):
            if not found or peak < found[-1][0]:
                found.append((peak, seconds))
        return dataclasses.replace(self.pipeline, budget=budget, allowed=allowed, trade_off=tuple(found))


_LONGER = 1e-9
"""Share of a makespan by which rounding may change it."""
_MOST_FILLED = 3
"""For so many plans it is worked out how much may be early."""
_GRADIENTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)


def _with_waits_filled(
    best: _Attempt,
    fitting: Sequence[_Attempt],
    attempt: Callable[[Candidate], _Attempt],
    split: bool,
    microbatches: int,
    limit: int,
) -> _Attempt:
    """The quickest step where devices recompute while they wait for gradients; ``best`` if that takes as long.

    What recomputes more may be quicker then: of the plans that fit, those are looked at whose step would be the
    shortest if all that can be early were.
    """
    promising = []
    for own in fitting:
        if own.chosen is not None:
            choices = early_choices(own.chosen.graph, own.chosen.candidate.schedule, split)
            promising.append((_makespan_if_early(own, choices, microbatches), own, choices))
    for shortest, own, choices in sorted(promising, key=lambda item: (item[0], item[1].peak))[:_MOST_FILLED]:
        if shortest < best.timing.makespan * (1 - _LONGER):
            best = min([best, *_filled(own, choices, attempt, limit)], key=lambda tried: tried.timing.makespan)
    return best


def _filled(
    own: _Attempt, choices: EarlyChoices, attempt: Callable[[Candidate], _Attempt], limit: int
) -> list[_Attempt]:
    """An attempt with as much early as fits: each device halves what its stages have early until it is within."""
    assert own.chosen is not None
    candidate = own.chosen.candidate
    level = {stage: len(of_stage) - 1 for stage, of_stage in choices.items()}
    orders = own.timing.schedule.orders
    while any(level.values()):
        found = attempt(dataclasses.replace(candidate, schedule=early_at(candidate.schedule, choices, level)))
        full = [order for order, peak in zip(orders, found.timing.peak_bytes, strict=True) if peak > limit]
        over = {stage for order in full for stage in order[:, 1].tolist() if level.get(stage)}
        if not full:
            return [found]
        if not over:
            break
        for stage in over:
            level[stage] //= 2
    return []


def _makespan_if_early(own: _Attempt, choices: EarlyChoices, microbatches: int) -> float:
    """The makespan if each stage ran all that may be early in its recompute module, whatever it holds."""
    assert own.chosen is not None
    steps = [step for _, block in own.chosen.candidate.schedule.backward for step in block]
    main = own.pipeline.main
    seconds, reads = dict(main.costs.seconds), dict(main.steps.graph.reads)
    for stage, of_stage in choices.items():
        early = sum(steps[place].seconds or steps[place].operation.seconds for place in of_stage[-1])
        backward = next((step for step in ((k, stage) for k in _GRADIENTS) if step in seconds), None)
        if early and backward is not None:
            recompute = (ActionKind.RECOMPUTE, stage)
            seconds[recompute], seconds[backward] = early, max(seconds[backward] - early, 0.0)
            reads[recompute] = tuple(source for source in reads[backward] if source[0] is ActionKind.FORWARD)
            reads[backward] = (*reads[backward], recompute)
    graph = StageGraph(reads, main.steps.graph.carried)
    costs = StepCosts(seconds=seconds, transfer_seconds=main.costs.transfer_seconds)
    variant = dataclasses.replace(main, steps=dataclasses.replace(main.steps, graph=graph), costs=costs)
    return dataclasses.replace(own.pipeline, main=variant, last=variant).predict(microbatches).makespan


def _choice(levels: Sequence[int], runs: Sequence[SegmentRun], points: Sequence[Sequence[ParetoPoint]]) -> RematChoice:
    """What all runs keep, given how thrifty each device is to be; the rungs of all runs end at the same level."""
    lowest = max(len(own) for own in points)
    choices = []
    for run, own in zip(runs, points, strict=True):
        level = max(levels[device] for device in run.devices)
        choices.append(own[round((level - 1) * (len(own) - 1) / max(lowest - 1, 1)) if level else 0].choice())
    return together(choices)


def _lowest(at: Callable[[Sequence[int]], _Attempt], last: int, devices: int) -> int:
    """The level at which the device that needs most needs least, as far as a few tell.

    The last ones may be too thrifty: what they make again, and again for that, is there at the same time.
    """

    def peak(level: int) -> int:
        return at([level] * devices).peak

    best = min(sorted({last, *(last * part // 8 for part in range(4, 8))}, reverse=True), key=peak)
    return min((level for level in range(best + 2, best - 3, -1) if 0 <= level <= last), key=peak)


def _alike(at: Callable[[Sequence[int]], _Attempt], lowest: int, devices: int, limit: int) -> int | None:
    """The least level with which every device fits if all have it; ``None``: there is none."""
    low, high = 0, lowest
    while low < high:
        middle = (low + high) // 2
        if at([middle] * devices).peak <= limit:
            high = middle
        else:
            low = middle + 1
    return low if at([low] * devices).peak <= limit else None


def _each(at: Callable[[Sequence[int]], _Attempt], level: int, devices: int, limit: int) -> None:
    """Try for each device the least level with which it fits."""
    low, high = [0] * devices, [level] * devices
    while low != high:
        middle = [(own + other) // 2 for own, other in zip(low, high, strict=True)]
        for device, peak in enumerate(at(middle).timing.peak_bytes):
            if low[device] == high[device]:
                continue
            if peak <= limit:
                high[device] = middle[device]
            else:
                low[device] = middle[device] + 1
    at(high)
