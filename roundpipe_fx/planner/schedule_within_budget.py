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

from roundpipe_fx.budget import Found, Infeasible, Result, bytes_text, limit_of, share_hint
from roundpipe_fx.codegen import KnownModules
from roundpipe_fx.compiler.emit import emit, emit_by_policy
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.operations_in_tiles import operations_of
from roundpipe_fx.pipeline.host_memory import host_budget_of
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline, gaps, variant_of
from roundpipe_fx.pipeline.settings import Pipelining, Structure
from roundpipe_fx.planner.alternatives import chosen_among
from roundpipe_fx.planner.attempt import Attempt
from roundpipe_fx.planner.cut_for_schedule import CutGraph
from roundpipe_fx.planner.fill_waits import with_waits_filled
from roundpipe_fx.planner.link_prices import LinkPrices
from roundpipe_fx.planner.offload_values import may_leave_unasked, quickest_offloaded, with_offloads
from roundpipe_fx.planner.runs import runs_of
from roundpipe_fx.planner.within_host import with_room_on_host, within_host
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.choose import Chosen
from roundpipe_fx.remat.in_flight import SegmentRun, points_of_run, together
from roundpipe_fx.remat.save_policy import SavePolicy
from roundpipe_fx.remat.schedule import RematChoice, remat_schedule
from roundpipe_fx.remat.search import Candidate, ParetoPoint, everything_kept, most_kept, work_out
from roundpipe_fx.remat.segment_chain import chain_of
from roundpipe_fx.schedules import simulate_time

__all__ = ["within_budget"]


def within_budget(
    cut: CutGraph,
    pipelining: Pipelining,
    split: bool,
    forwards_before_backwards: bool,
    budget: int | float,
    stage_inputs: SavePolicy,
    fewer_weights: bool = False,
) -> Result[LoweredPipeline]:
    """The shortest step that is found with every device within the budget.

    Args:
        cut: a graph with stages.
        pipelining: the user's.
        split: whether gradients of parameters are computed in modules of their own.
        forwards_before_backwards: whether all forwards run before all backwards.
        budget: bytes per device, or a share of the way from the least that can be reached to saving everything.
        stage_inputs: saves what enters stages: saving that alone is always one of the possibilities.
        fewer_weights: whether the graph can be cut for fewer weights on a device at one time. That makes a shorter step
            than a plan for which there is hardly room.
    """
    attempts = _Attempts(cut, pipelining, split, forwards_before_backwards)
    blocks, share = attempts.blocks, cut.setting.share
    chain, save_options = chain_of(blocks)
    most = most_kept(blocks, save_options) if blocks.graph.regions else everything_kept(blocks)
    first = attempts.with_choice(most.schedule.choice)
    allowed = budget if isinstance(budget, int) else None
    if allowed is not None and pipelining.budget_has_weights:
        left = _beside_weights(allowed, first, pipelining)
        if isinstance(left, Infeasible):
            return left
        budget = allowed = left
    highest = _with_all_gathered(first)
    limit = int((highest if allowed is None else allowed) * share)
    if first.peak <= limit and (isinstance(budget, int) or budget == 1.0):
        return Found(chosen_among([first], first, limit, allowed))
    runs = runs_of(first.timing, cut.joint.cuts)
    may_leave = may_leave_unasked(first, pipelining)
    on_host = host_budget_of(first.pipeline, pipelining) if may_leave or pipelining.offloaded else None
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
    if fewer_weights and prices is not None and not prices.any_fits(limit):
        return _refusal(limit, first.peak, cut.structure, pipelining)
    levels = _Levels(attempts, first, runs, [points_of_run(blocks.graph, chain, save_options, run) for run in runs])
    others = [] if blocks.graph.regions else [attempts.with_policy(stage_inputs)]

    def sent_within(bytes_there: int) -> list[Attempt]:
        known = [*attempts.of_choices, *others] if may_leave else []
        return with_room_on_host([with_offloads(attempt, bytes_there) for attempt in known], pipelining, on_host)

    sent: list[Attempt] = []
    level = levels.alike(levels.last, limit) if isinstance(budget, int) else None
    if isinstance(budget, int):
        sent = sent_within(limit)
    if level is None and (not pipelining.offloaded or all(attempt.peak > limit for attempt in sent)):
        lowest = levels.lowest()
        if isinstance(budget, float):
            leanest = [*attempts.of_choices, *others]
            leanest += sent_within(0) if pipelining.offloaded else []  # on devices, shares are those without a host
            low = min(attempt.peak for attempt in leanest)
            limit = int(limit_of(budget, low, highest) * share)
        level = levels.alike(lowest, limit)
        sent = sent_within(limit)
    if level is not None and len(runs) > 1:  # with one, all devices have its level
        levels.each(level, limit)
    recomputing = [*attempts.of_choices, *others]
    tried = [*recomputing, *sent]
    if isinstance(budget, float) and budget == 0.0:
        limit = min(attempt.peak for attempt in (tried if pipelining.offloaded else recomputing))
    # The least budget that a refusal names does not depend on these: they depend on what was asked.
    priced: list[Attempt] = []
    if prices is not None:
        priced = quickest_offloaded(
            lambda price, within: attempts.with_choice(prices.choice_at(price, within)), limit, pipelining, on_host
        )
        priced = with_room_on_host(priced, pipelining, on_host)
    fitting = [attempt for attempt in (*tried, *priced) if attempt.peak <= limit]
    if pipelining.offloaded:
        fitting = within_host(fitting, pipelining, on_host)
    if not fitting:
        least = min(tried, key=lambda attempt: attempt.peak)
        if allowed is not None:
            return _refusal(allowed, least.peak, cut.structure, pipelining)
        fitting = [least]
    best = min(fitting, key=lambda attempt: (attempt.timing.makespan, attempt.seconds, attempt.peak))
    if pipelining.workers > 1:
        # Without those that were made for the link, so that a step is not longer than if there was no host.
        fitting = [attempt for attempt in recomputing if attempt.peak <= limit]
        best = with_waits_filled(best, fitting, attempts.with_candidate, split, pipelining.microbatches, limit)
    return Found(chosen_among([*tried, *priced], best, max(limit, best.peak), allowed))


def _with_all_gathered(attempt: Attempt) -> int:
    """Bytes of the device that needs most if sharded parameters are never dropped before their last reader."""
    costs, timing = attempt.pipeline.main.costs, attempt.timing
    kept = gaps(timing.schedule, costs)
    if not kept:
        return attempt.peak
    return max(simulate_time(timing.schedule, timing.graph, costs, kept=kept).peak_bytes)


def _beside_weights(budget: int, attempt: Attempt, pipelining: Pipelining) -> int | Infeasible[str]:
    """The bytes that a budget leaves beside the weights and optimizer state of the device that has most of them.

    Every device is given the same: it is what ``memory_budget`` means where the step runs, on all ranks.

    Args:
        budget: bytes of a device, for its weights and its steps.
        attempt: any; all run the same stages on the same devices.
        pipelining: the user's.

    Returns:
        the bytes; infeasible: nothing is left.
    """
    held, optimizer = attempt.pipeline.bytes_between_steps(attempt.timing.schedule)
    weights = max(map(sum, zip(held, optimizer, strict=True)))
    if weights < budget:
        return budget - weights
    text = (
        f"the parameters and buffers{' and the optimizer state' if any(optimizer) else ''} of the stages of one of "
        f"{pipelining.workers} devices alone take "
        f"{bytes_text(weights)}, and {bytes_text(budget)} of its memory are for them and a step. Use more devices, "
        "stages that divide the weights more evenly, or offloaded=True."
    )
    return Infeasible(minimum=weights, bottleneck=text)


class _Attempts:
    """Plans that are emitted to simulate their schedule: each copies the graph, and takes the stage modules of others
    that do the same. Only the chosen one is emitted a second time, with its own.

    Attributes:
        blocks: the graph's operations as the planner sees them.
        devices: how many devices there are.
    """

    def __init__(self, cut: CutGraph, pipelining: Pipelining, split: bool, forwards_before_backwards: bool) -> None:
        # Gradients that go to the host after each residency window are no part of what is allocated in any case.
        sums = pipelining.microbatches > 1 or pipelining.offloaded
        self.blocks = Blocks(operations_of(cut.joint, cut.setting, sums=sums))
        self.devices = pipelining.workers
        self._cut = cut
        self._pipelining = pipelining
        self._split = split
        self._forwards_before_backwards = forwards_before_backwards
        self._by_choice: list[tuple[RematChoice, Attempt]] = []
        self._known: KnownModules = {}

    @property
    def of_choices(self) -> list[Attempt]:
        """The attempts so far that were made by a choice, in order."""
        return [attempt for _, attempt in self._by_choice]

    def with_choice(self, choice: RematChoice) -> Attempt:
        """The attempt that saves what a choice says. Levels that differ often make the same choice."""
        known = [attempt for other, attempt in self._by_choice if other == choice]
        if not known:
            known = [self.with_candidate(work_out(self.blocks, choice))]
            self._by_choice.append((choice, known[0]))
        return known[0]

    def with_candidate(self, candidate: Candidate) -> Attempt:
        """The attempt that follows a schedule of the planner."""
        graph = self.blocks.graph
        chosen = Chosen(candidate=candidate, limit=candidate.peak.bytes, graph=graph, frontier=(), followed=graph)

        def emitted(known: KnownModules | None) -> Lowered:
            joint = self._cut.joint.copy()
            setting = self._cut.setting.knowing(schedule=remat_schedule(graph, candidate.schedule).on(joint.graph))
            return emit(joint, setting, chosen=chosen, split=self._split, sums=True, known=known)

        return self._simulated(emitted, chosen)

    def with_policy(self, policy: SavePolicy) -> Attempt:
        """The attempt that saves what a policy says."""

        def emitted(known: KnownModules | None) -> Lowered:
            joint, setting = self._cut.joint.copy(), self._cut.setting
            return emit_by_policy(joint, setting, policy, split=self._split, sums=True, known=known)

        return self._simulated(emitted)

    def _simulated(self, emitted: Callable[[KnownModules | None], Lowered], chosen: Chosen | None = None) -> Attempt:
        has_own_modules = not self._known
        only = variant_of(emitted(self._known), self._cut.setting, self._pipelining)
        pipeline = LoweredPipeline(
            main=only,
            last=only,
            structure=self._cut.structure,
            staged=self._cut.joint,
            pipelining=self._pipelining,
            forwards_before_backwards=self._forwards_before_backwards,
        )
        timing = pipeline.predict(self._pipelining.microbatches)
        return Attempt(pipeline, timing, chosen, None if has_own_modules else functools.partial(emitted, None))


class _Levels:
    """Attempts by the level of each device.

    Attributes:
        last: the highest level.
    """

    def __init__(
        self,
        attempts: _Attempts,
        first: Attempt,
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
        """The least level up to ``last`` with which every device fits if all have it; ``None``: there is none."""
        low, high = 0, last
        while low < high:
            middle = (low + high) // 2
            if self.at(middle).peak <= limit:
                high = middle
            else:
                low = middle + 1
        return low if self.at(low).peak <= limit else None

    def each(self, level: int, limit: int) -> None:
        """Try for each device the least level with which it fits, up to ``level``."""
        low, high = [0] * self._devices, [level] * self._devices
        while low != high:
            middle = [(below + above) // 2 for below, above in zip(low, high, strict=True)]
            for device, peak in enumerate(self._at(middle).timing.peak_bytes):
                if low[device] == high[device]:
                    continue
                if peak <= limit:
                    high[device] = middle[device]
                else:
                    low[device] = middle[device] + 1
        self._at(high)

    def lowest(self) -> int:
        """The level at which the device that needs most needs least, among those that are sampled.

        The last levels may save too little: recomputed values, and those recomputed for them, are alive together.
        """

        def peak(level: int) -> int:
            return self.at(level).peak

        last = self.last
        best = min(sorted({last, *(last * part // 8 for part in range(4, 8))}, reverse=True), key=peak)
        return min((level for level in range(best + 2, best - 3, -1) if 0 <= level <= last), key=peak)

    def at(self, level: int) -> Attempt:
        """The attempt in which all devices have one level."""
        return self._at([level] * self._devices)

    def _at(self, levels: Sequence[int]) -> Attempt:
        if tuple(levels) not in self._known:
            self._known[tuple(levels)] = self._attempts.with_choice(self._choice(levels))
        return self._known[tuple(levels)]

    def _choice(self, levels: Sequence[int]) -> RematChoice:
        """What all runs save, given each device's level; the last points of all runs are at the same level."""
        choices = []
        for run, points in zip(self._runs, self._points, strict=True):
            level = max(levels[device] for device in run.devices)
            point = round((level - 1) * (len(points) - 1) / max(self.last - 1, 1)) if level else 0
            choices.append(points[point].choice())
        return together(choices)


def _refusal(allowed: int, minimum: int, structure: Structure, pipelining: Pipelining) -> Infeasible[str]:
    text = (
        f"memory_budget of {allowed} bytes ({bytes_text(allowed)}) a device cannot be met: with schedule "
        f"{structure.name!r}, {pipelining.workers} devices and {pipelining.microbatches} microbatches, the "
        f"device that needs most needs at least {minimum} bytes ({bytes_text(minimum)}). Use more and "
        "smaller microbatches, more devices, another schedule, or a budget of at least the minimum."
        f"{share_hint(allowed)}"
    )
    return Infeasible(minimum=minimum, bottleneck=text)
