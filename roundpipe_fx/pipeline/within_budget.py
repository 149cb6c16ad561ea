"""Within a budget: a pipeline that recomputes little, with no device above its bytes.

What a device holds depends on how many microbatches are in flight there, so each run of segments whose values lie on
the same devices has its own ways of saving less (:mod:`roundpipe_fx.remat.in_flight`). How many bytes devices need
is not known before modules are emitted and the schedule is simulated. A *level* says how little a device saves: 0 is
everything. Bytes fall as levels rise, so plans are found by bisection: first with one level for all devices, then with
one for each::

    level      0 ─────────── 4 ─────────── 8          all devices alike: the least level that fits is 5
    device 0   ├─────────── 4 fits                    then each for itself: device 0 has more in flight
    device 1   ├── 1 fits
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from roundpipe_fx.budget import InfeasibleBudgetError, bytes_text, limit_of, share_hint
from roundpipe_fx.compiler.lower import emit, emit_by_policy, operations_of
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.pipeline.attempt import Attempt
from roundpipe_fx.pipeline.fill_waits import with_waits_filled
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline, Structure, variant_of
from roundpipe_fx.pipeline.runs import runs_of
from roundpipe_fx.pipeline.settings import Pipelining
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.choose import Chosen
from roundpipe_fx.remat.in_flight import SegmentRun, points_of_run, together
from roundpipe_fx.remat.save_policy import SavePolicy
from roundpipe_fx.remat.schedule import RematChoice, remat_schedule
from roundpipe_fx.remat.search import Candidate, ParetoPoint, everything_kept, most_kept, work_out
from roundpipe_fx.remat.segment_chain import chain_of
from roundpipe_fx.schedules import Schedule

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

    def attempted(lowered: Lowered, chosen: Chosen | None = None) -> Attempt:
        only = variant_of(lowered, setting, pipelining)
        pipeline = LoweredPipeline(
            main=only,
            last=only,
            structure=structure,
            given=given,
            devices=pipelining.workers,
            forwards_before_backwards=forwards_before_backwards,
        )
        return Attempt(pipeline, pipeline.predict(pipelining.microbatches), chosen)

    def with_schedule(candidate: Candidate) -> Attempt:
        own = joint.copy()
        remat = remat_schedule(blocks.graph, candidate.schedule).on(own.graph)
        chosen = Chosen(
            candidate=candidate, limit=candidate.peak.bytes, graph=blocks.graph, frontier=(), followed=blocks.graph
        )
        known = setting.knowing(schedule=remat)
        return attempted(emit(own, known, chosen=chosen, split=split, sums=True), chosen)

    made: list[tuple[RematChoice, Attempt]] = []

    def attempt(choice: RematChoice) -> Attempt:
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

    def at(levels: Sequence[int]) -> Attempt:
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
            raise _refusal(allowed, least.peak, structure, pipelining)
        fitting = [least]
    best = min(fitting, key=lambda own: (own.timing.makespan, own.seconds, own.peak))
    if pipelining.workers > 1:
        best = with_waits_filled(best, fitting, with_schedule, split, pipelining.microbatches, limit)
    return best.within(max(limit, best.peak), allowed, attempts)


def _refusal(allowed: int, minimum: int, structure: Structure, pipelining: Pipelining) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        f"memory_budget of {allowed} bytes ({bytes_text(allowed)}) a device cannot be met: with schedule "
        f"{structure.name!r}, {pipelining.workers} devices and {pipelining.microbatches} microbatches, the "
        f"device that needs most needs at least {minimum} bytes ({bytes_text(minimum)}). Use more and "
        "smaller microbatches, more devices, another schedule, or a budget of at least the minimum."
        f"{share_hint(allowed)}",
        minimum,
    )


def _choice(levels: Sequence[int], runs: Sequence[SegmentRun], points: Sequence[Sequence[ParetoPoint]]) -> RematChoice:
    """What all runs keep, given each device's level; the last points of all runs are at the same level."""
    lowest = max(len(own) for own in points)
    choices = []
    for run, own in zip(runs, points, strict=True):
        level = max(levels[device] for device in run.devices)
        choices.append(own[round((level - 1) * (len(own) - 1) / max(lowest - 1, 1)) if level else 0].choice())
    return together(choices)


def _lowest(at: Callable[[Sequence[int]], Attempt], last: int, devices: int) -> int:
    """The level at which the device that needs most needs least, as far as a few tell.

    The last ones may save too little: what they recompute, and again for that, is there at the same time.
    """

    def peak(level: int) -> int:
        return at([level] * devices).peak

    best = min(sorted({last, *(last * part // 8 for part in range(4, 8))}, reverse=True), key=peak)
    return min((level for level in range(best + 2, best - 3, -1) if 0 <= level <= last), key=peak)


def _alike(at: Callable[[Sequence[int]], Attempt], lowest: int, devices: int, limit: int) -> int | None:
    """The least level with which every device fits if all have it; ``None``: there is none."""
    low, high = 0, lowest
    while low < high:
        middle = (low + high) // 2
        if at([middle] * devices).peak <= limit:
            high = middle
        else:
            low = middle + 1
    return low if at([low] * devices).peak <= limit else None


def _each(at: Callable[[Sequence[int]], Attempt], level: int, devices: int, limit: int) -> None:
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
