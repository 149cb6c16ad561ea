"""Within a budget: a pipeline that recomputes little, with no device above its bytes.

How many bytes a device holds depends on how many microbatches are in flight there, so each run of segments whose values
lie on the same devices has its own frontier of save options (:mod:`roundpipe_fx.remat.in_flight`). How many bytes
devices need is not known before modules are emitted and the schedule is simulated. A *level* says how little a device
saves: 0 is everything. Bytes fall as levels rise, so plans are found by bisection: first with one level for all
devices, then with one for each::

    level      0 ─────────── 4 ─────────── 8          all devices alike: the least level that fits is 5
    device 0   ├─────────── 4 fits                    then each for itself: device 0 has more in flight
    device 1   ├── 1 fits

Where values may leave for the host, plans are also found by the price of the link
(:mod:`roundpipe_fx.planner.offload_values`).

Of all plans that were simulated and fit, the one with the shortest step is taken; then recomputation is moved into the
time in which devices wait (:mod:`roundpipe_fx.planner.fill_waits`). What the budget has left then keeps sharded
parameters gathered (:mod:`roundpipe_fx.schedules.sharding`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from roundpipe_fx.budget import Found, Infeasible, bytes_text, limit_of, share_hint
from roundpipe_fx.codegen import KnownModules
from roundpipe_fx.compiler.emit import emit, emit_by_policy
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.operations_in_tiles import read_graph_operations
from roundpipe_fx.pipeline.host_memory import host_budget_of, host_memory_of
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline, Variant, gaps, make_variant
from roundpipe_fx.pipeline.settings import Pipelining, Structure
from roundpipe_fx.planner.alternatives import with_frontier
from roundpipe_fx.planner.cut_for_schedule import CutGraph
from roundpipe_fx.planner.evaluation import Candidate, ScheduleEvaluation, evaluate_schedule, find_quickest
from roundpipe_fx.planner.fill_waits import fill_waits
from roundpipe_fx.planner.link_prices import LinkPrices
from roundpipe_fx.planner.offload_values import may_offload_unasked, offload_to_fit, search_link_prices
from roundpipe_fx.planner.runs import find_runs
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import (
    ParetoPoint,
    SimulatedSchedule,
    make_schedule_of_choice,
    save_everything,
    save_most,
)
from roundpipe_fx.remat.choose import Bottleneck, Chosen, Unmet
from roundpipe_fx.remat.in_flight import SegmentRun, find_points_of_run, merge_choices
from roundpipe_fx.remat.save_policy import SavePolicy
from roundpipe_fx.remat.schedule import RematChoice, remat_schedule
from roundpipe_fx.remat.segment_chain import chain_of
from roundpipe_fx.schedules import simulate_time


def plan_schedule(
    cut: CutGraph,
    pipeline: Callable[[CutGraph, Variant, Variant], LoweredPipeline],
    pipelining: Pipelining,
    split: bool,
    budget: int | float,
    stage_inputs: SavePolicy,
    fewer_weights: bool = False,
) -> Found[ScheduleEvaluation] | Unmet:
    """The shortest step that is found with every device within the budget.

    Args:
        cut: a graph with stages.
        pipeline: puts a pipeline together.
        split: whether gradients of parameters are computed in modules of their own.
        budget: bytes per device, or a share of the way from the least that can be reached to saving everything.
        stage_inputs: saves what enters stages: saving that alone is always one of the possibilities.
        fewer_weights: whether the graph can be cut for fewer weights on a device at one time. That makes a shorter step
            than a plan for which there is hardly room.
    """
    attempts = _Attempts(cut, pipeline, pipelining, split)
    blocks, share = attempts.blocks, cut.setting.share
    # The plan that saves everything is the start: it says which microbatches are in flight, and whether there is
    # anything to do.
    chain, save_options = chain_of(blocks)
    most = save_most(blocks, save_options) if blocks.graph.regions else save_everything(blocks)
    first = attempts.evaluate_choice(most.schedule.choice)
    allowed = budget if isinstance(budget, int) else None
    if allowed is not None and pipelining.budget_has_weights:
        held = _heaviest_weights(first, pipelining)
        if sum(held) >= allowed:
            return _refuse_by_weights(allowed, held, pipelining)
        # What devices hold between steps is taken off once, for all plans.
        budget = allowed = allowed - sum(held)
    highest = _bytes_with_all_gathered(first)
    limit = int((highest if allowed is None else allowed) * share)
    if first.peak <= limit and (isinstance(budget, int) or budget == 1.0):
        return Found(with_frontier([first], first, limit, allowed))
    runs = find_runs(first.timing, cut.joint.cuts)
    may_leave = may_offload_unasked(first, pipelining)
    on_host = host_budget_of(first.emitted, pipelining) if may_leave or pipelining.offloaded else None
    prices = None
    if may_leave:
        prices = LinkPrices(
            graph=blocks.graph,
            chain=chain,
            save_options=save_options,
            runs=runs,
            first=first,
            cuts=cut.joint.cuts,
        )
    # Weights of fewer stages at a time: only worthwhile if some choice fits at all.
    if fewer_weights and prices is not None and not prices.can_fit(limit):
        return refuse_budget(limit, first.peak, cut.structure, pipelining)
    # Save less: at levels of devices, or only what enters stages. Send to the host: of each such plan, if it may leave.
    levels = _Levels(
        attempts, first, runs, [find_points_of_run(blocks.graph, chain, save_options, run) for run in runs]
    )
    others = [] if blocks.graph.regions else [attempts.evaluate(Candidate(stage_inputs))]

    def sent_within(bytes_there: int) -> list[ScheduleEvaluation]:
        known = [*attempts.evaluations_of_choices, *others] if may_leave else []
        return _keep_fitting_host([offload_to_fit(attempt, bytes_there) for attempt in known], pipelining, on_host)

    sent: list[ScheduleEvaluation] = []
    # Bisection with all devices alike is tried for a budget in bytes; a fraction needs the lowest peak first.
    level = levels.alike(levels.last, limit) if isinstance(budget, int) else None
    if isinstance(budget, int):
        sent = sent_within(limit)
    if level is None and (not pipelining.offloaded or all(attempt.peak > limit for attempt in sent)):
        lowest = levels.find_lowest()
        if isinstance(budget, float):
            leanest = [*attempts.evaluations_of_choices, *others]
            leanest += sent_within(0) if pipelining.offloaded else []  # on devices, shares are those without a host
            # 0.0 is the least that devices can do, 1.0 the plan that saves all.
            low = min(attempt.peak for attempt in leanest)
            limit = int(limit_of(budget, low, highest) * share)
        level = levels.alike(lowest, limit)
        sent = sent_within(limit)
    if level is not None and len(runs) > 1:  # with one, all devices have its level
        levels.lower_each_device(level, limit)
    recomputing = [*attempts.evaluations_of_choices, *others]
    tried = [*recomputing, *sent]
    if isinstance(budget, float) and budget == 0.0:
        limit = min(attempt.peak for attempt in (tried if pipelining.offloaded else recomputing))
    # Send to the host, at prices of the link. The least budget that a refusal names does not depend on
    # these plans: they depend on what was asked.
    priced: list[ScheduleEvaluation] = []
    if prices is not None:
        priced = search_link_prices(
            lambda price, within: attempts.evaluate_choice(prices.choose_at_price(price, within)),
            limit,
            first.seconds,
            pipelining,
            on_host,
        )
        priced = _keep_fitting_host(priced, pipelining, on_host)
    # Everything that was simulated competes: levels, stage inputs only, values on the host, prices of the link.
    fitting = [attempt for attempt in (*tried, *priced) if attempt.peak <= limit]
    if pipelining.offloaded:
        fitting = _require_host_memory(fitting, pipelining, on_host)
    if not fitting:
        least = min(tried, key=lambda attempt: attempt.peak)
        if allowed is not None:
            return refuse_budget(allowed, least.peak, cut.structure, pipelining)
        fitting = [least]
    # The quickest plan within the limit; if only the leanest is left, its own peak is the limit.
    best = find_quickest(fitting, max(limit, fitting[0].peak))
    assert best is not None
    if pipelining.workers > 1:
        # Recompute early: without those that were made for the link, so that a step is not longer than without a host.
        fitting = [attempt for attempt in recomputing if attempt.peak <= limit]
        best = fill_waits(best, fitting, attempts.evaluate_schedule, split, pipelining.microbatches, limit)
    return Found(with_frontier([*tried, *priced], best, max(limit, best.peak), allowed))


def _keep_fitting_host(
    attempts: Sequence[ScheduleEvaluation], pipelining: Pipelining, budget: int | None
) -> list[ScheduleEvaluation]:
    """Keep the attempts whose offloaded values fit the host budget.

    The weights of an offloaded model need host memory in any case; :func:`_require_host_memory` compares the sum.
    """
    if pipelining.offloaded or budget is None:
        return list(attempts)
    return [
        attempt
        for attempt in attempts
        if attempt.emitted.offload is None
        or host_memory_of(attempt.emitted, attempt.timing, pipelining).total <= budget
    ]


def _require_host_memory(
    fitting: Sequence[ScheduleEvaluation], pipelining: Pipelining, budget: int | None
) -> list[ScheduleEvaluation]:
    """Keep the attempts that fit the host memory; if none does, the one that needs least of it."""
    needed = [host_memory_of(attempt.emitted, attempt.timing, pipelining).total for attempt in fitting]
    if budget is None or not fitting:
        return list(fitting)
    within = [attempt for attempt, bytes_needed in zip(fitting, needed, strict=True) if bytes_needed <= budget]
    return within or [fitting[needed.index(min(needed))]]


def _bytes_with_all_gathered(attempt: ScheduleEvaluation) -> int:
    """Bytes of the fullest device if sharded parameters stay gathered until their last reader."""
    costs, timing = attempt.emitted.main.costs, attempt.timing
    kept = gaps(timing.schedule, costs)
    if not kept:
        return attempt.peak
    return max(simulate_time(timing.schedule, timing.graph, costs, kept=kept).peak_bytes)


def _heaviest_weights(attempt: ScheduleEvaluation, pipelining: Pipelining) -> tuple[int, int]:
    """Bytes of the weights, and of the optimizer state, of the device that has most of both.

    A budget for both a device and its step leaves every device the same: it is what ``memory_budget`` means where the
    step runs, on all ranks.

    Args:
        attempt: any; all run the same stages on the same devices.
    """
    return max(zip(*attempt.emitted.bytes_between_steps(attempt.timing.schedule), strict=True), key=sum)


def _refuse_by_weights(budget: int, held: tuple[int, int], pipelining: Pipelining) -> Unmet:
    weights, optimizer = held
    text = (
        f"the parameters and buffers{' and the optimizer state' if optimizer else ''} of the stages of one of "
        f"{pipelining.workers} devices alone take "
        f"{bytes_text(weights + optimizer)}, and {bytes_text(budget)} of its memory are for them and a step. Use more "
        "devices, stages that divide the weights more evenly, or offloaded=True."
    )
    return Infeasible(minimum=weights + optimizer, bottleneck=Bottleneck(text=text))


class _Attempts:
    """Plans that are emitted to simulate their schedule: each copies the graph, and takes the stage modules of others
    that do the same. Only the chosen one is emitted a second time, with its own.

    Attributes:
        blocks: the graph's operations as the planner sees them.
        devices: how many devices there are.
    """

    def __init__(
        self,
        cut: CutGraph,
        pipeline: Callable[[CutGraph, Variant, Variant], LoweredPipeline],
        pipelining: Pipelining,
        split: bool,
    ) -> None:
        # Gradients that go to the host after each residency window are no part of what is allocated in any case.
        sums = pipelining.microbatches > 1 or pipelining.offloaded
        self.blocks = Blocks(read_graph_operations(cut.joint, cut.setting, sums=sums))
        self.devices = pipelining.workers
        self._cut = cut
        self._pipelining = pipelining
        self._split = split
        self._pipeline = pipeline
        self._by_choice: list[tuple[RematChoice, ScheduleEvaluation]] = []
        self._known: KnownModules = {}

    @property
    def evaluations_of_choices(self) -> list[ScheduleEvaluation]:
        """The evaluations so far that were made by a choice, in order."""
        return [evaluation for _, evaluation in self._by_choice]

    def evaluate_choice(self, choice: RematChoice) -> ScheduleEvaluation:
        """Evaluate saving what a choice says. Levels that differ often make the same choice."""
        known = [evaluation for other, evaluation in self._by_choice if other == choice]
        if not known:
            known = [self.evaluate_schedule(make_schedule_of_choice(self.blocks, choice))]
            self._by_choice.append((choice, known[0]))
        return known[0]

    def evaluate_schedule(self, schedule: SimulatedSchedule) -> ScheduleEvaluation:
        """Evaluate a schedule that was searched for."""
        graph = self.blocks.graph
        chosen = Chosen(candidate=schedule, limit=schedule.peak.bytes, graph=graph, frontier=(), followed=graph)
        return self.evaluate(Candidate(chosen))

    def evaluate(self, candidate: Candidate) -> ScheduleEvaluation:
        """Emit a candidate, and simulate its schedule with nothing on the host that the user does not want there."""
        emitted = functools.partial(self._emit, candidate.saved)
        has_own_modules = not self._known
        only = make_variant(emitted(self._known), self._cut.setting, self._pipelining)
        pipeline = self._pipeline(self._cut, only, only)
        return evaluate_schedule(candidate, pipeline, None if has_own_modules else functools.partial(emitted, None))

    def _emit(self, saved: Chosen | SavePolicy, known: KnownModules | None) -> Lowered:
        joint, setting, split = self._cut.joint.copy(), self._cut.setting, self._split
        if not isinstance(saved, Chosen):
            return emit_by_policy(joint, setting, saved, split=split, sums=True, known=known)
        setting = setting.with_decisions(
            schedule=remat_schedule(saved.graph, saved.candidate.schedule).copy_to(joint.graph)
        )
        return emit(joint, setting, chosen=saved, split=split, sums=True, known=known)


class _Levels:
    """Attempts by the level of each device."""

    def __init__(
        self,
        attempts: _Attempts,
        first: ScheduleEvaluation,
        runs: Sequence[SegmentRun],
        points: Sequence[Sequence[ParetoPoint]],
    ) -> None:
        self.last = max(len(of_run) for of_run in points)
        self._attempts = attempts
        self._runs = runs
        self._points = points
        """The frontier of each run, from saving most to saving least."""
        self._devices = attempts.devices
        self._known = {(0,) * self._devices: first}

    def alike(self, last: int, limit: int) -> int | None:
        """Find the least common level up to ``last`` at which every device fits; ``None`` if there is none."""
        # Peaks fall as levels rise. Invariant: everything below `low` exceeds the limit; `high` fits, or is the last.
        low, high = 0, last
        while low < high:
            middle = (low + high) // 2
            if self.evaluate_level(middle).peak <= limit:
                high = middle
            else:
                low = middle + 1
        return low if self.evaluate_level(low).peak <= limit else None

    def lower_each_device(self, level: int, limit: int) -> None:
        """Lower the level of one device after another, from ``level``, as far as it still fits."""
        # One bisection per device, all at once: a device's peak depends on its own level, mostly.
        low, high = [0] * self._devices, [level] * self._devices
        while low != high:
            middle = [(below + above) // 2 for below, above in zip(low, high, strict=True)]
            for device, peak in enumerate(self._known_attempt(middle).peaks):
                if low[device] == high[device]:
                    continue
                if peak <= limit:
                    high[device] = middle[device]
                else:
                    low[device] = middle[device] + 1
        self._known_attempt(high)

    def find_lowest(self) -> int:
        """The level at which the device that needs most needs least, among those that are sampled.

        The last levels may save too little: recomputed values, and those recomputed for them, are alive together.
        """

        def peak(level: int) -> int:
            return self.evaluate_level(level).peak

        last = self.last
        # The lowest peak is near the end, not always at it: eighths first, then neighbours of the best.
        best = min(sorted({last, *(last * part // 8 for part in range(4, 8))}, reverse=True), key=peak)
        return min((level for level in range(best + 2, best - 3, -1) if 0 <= level <= last), key=peak)

    def evaluate_level(self, level: int) -> ScheduleEvaluation:
        """The attempt in which all devices have one level."""
        return self._known_attempt([level] * self._devices)

    def _known_attempt(self, levels: Sequence[int]) -> ScheduleEvaluation:
        if tuple(levels) not in self._known:
            self._known[tuple(levels)] = self._attempts.evaluate_choice(self._choose(levels))
        return self._known[tuple(levels)]

    def _choose(self, levels: Sequence[int]) -> RematChoice:
        """Choose what all runs save, given each device's level; the last points of all runs are at the same level."""
        choices = []
        for run, points in zip(self._runs, self._points, strict=True):
            # A run that lies on several devices follows the one that has to save least.
            level = max(levels[device] for device in run.devices)
            point = round((level - 1) * (len(points) - 1) / max(self.last - 1, 1)) if level else 0
            choices.append(points[point].choice())
        return merge_choices(choices)


def refuse_budget(allowed: int, minimum: int, structure: Structure, pipelining: Pipelining) -> Unmet:
    """The refusal of a budget in bytes.

    Args:
        allowed: bytes a device that were asked for.
        minimum: bytes of the device that needs most, in the pipeline that needs least.
        structure: how the graph was cut.
    """
    text = (
        f"memory_budget of {allowed} bytes ({bytes_text(allowed)}) a device cannot be met: with schedule "
        f"{structure.name!r}, {pipelining.workers} devices and {pipelining.microbatches} microbatches, the "
        f"device that needs most needs at least {minimum} bytes ({bytes_text(minimum)}). Use more and "
        "smaller microbatches, more devices, another schedule, or a budget of at least the minimum."
        f"{share_hint(allowed)}"
    )
    return Infeasible(minimum=minimum, bottleneck=Bottleneck(text=text))
