"""Lowering for a pipeline: stages for devices, steps with their costs, and the schedule that fits the budget.

The passes are those of every other compilation. What differs is how a graph is cut (one stage a device, several, or
RoundPipe's slots), that the backward may be split, and that plans are judged by simulating the schedule: how long a
step takes, and how many bytes each device holds with the microbatches that are in flight.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from roundpipe_fx.budget import InfeasibleBudgetError, bytes_text, limit_of
from roundpipe_fx.cost import MeasuredCosts
from roundpipe_fx.joint_graph import JointGraph
from roundpipe_fx.lower import CHOOSERS, Lowered, Prepared, Setting, asked_budget, cut_as_asked, emit, prepare
from roundpipe_fx.options import Options
from roundpipe_fx.passes.follow_schedule import follow_schedule
from roundpipe_fx.passes.recompute_regions import region_bounds
from roundpipe_fx.passes.rematerialize import keep_slot_inputs
from roundpipe_fx.passes.rounds import cut_rounds
from roundpipe_fx.passes.segments import cut_segments
from roundpipe_fx.passes.stages import stages_of_starts
from roundpipe_fx.pipeline.make_schedule import make_schedule
from roundpipe_fx.pipeline.settings import SCHEDULES, Pipelining
from roundpipe_fx.pipeline.steps import Steps, step_costs, steps_of
from roundpipe_fx.planner.blocks import Blocks
from roundpipe_fx.planner.choose import Chosen
from roundpipe_fx.planner.operations import read_operations
from roundpipe_fx.planner.search import search, work_out
from roundpipe_fx.schedules import (
    Kind,
    Schedule,
    StageGraph,
    StepCosts,
    Timing,
    simulate_time,
    validate,
    with_recompute,
)
from roundpipe_fx.schedules.fit_rounds import Rounds, fit_rounds
from roundpipe_fx.segment import Segment, StageCut
from roundpipe_fx.simulator import allocation_granularity

__all__ = ["LoweredPipeline", "Structure", "Variant", "lower_pipeline"]

_LEVELS = 12
"""So many plans for one microbatch, without and with nested recomputation, are there to choose from."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Variant:
    """One lowering of a graph as steps.

    Attributes:
        lowered: plan, programs and stage modules.
        steps: the stage modules as steps.
        costs: of the steps.
    """

    lowered: Lowered
    steps: Steps
    costs: StepCosts


@dataclass(frozen=True)
class Structure:
    """How a graph was cut: microbatches of another shape in the same step are cut alike.

    Attributes:
        name: of the schedule.
        segments: how many there were.
        cut: RoundPipe's slots, or the first segment of each stage.
    """

    name: str
    segments: int
    cut: Rounds | tuple[int, ...]


@dataclass(frozen=True)
class LoweredPipeline:
    """A graph that was lowered for a pipeline.

    Attributes:
        main: what most microbatches run.
        last: what the last microbatch runs; the same unless ``checkpoint="except_last"``.
        structure: how the graph was cut, and for which schedule.
        given: the user's schedule, if he gave one.
        devices: how many.
        budget: bytes that a device may allocate at most at one time; ``None``: no limit.
    """

    main: Variant
    last: Variant
    structure: Structure
    given: Schedule | None
    devices: int
    budget: int | None = None

    def schedule(self, graph: StageGraph, microbatches: int) -> Schedule:
        """The schedule for so many microbatches.

        Args:
            graph: what there is to do for a microbatch; that of ``main`` unless microbatches differ.
            microbatches: how many.

        Raises:
            InvalidScheduleError: a given schedule does not fit; the message names the action.
        """
        if self.given is not None:
            made = with_recompute(self.given, graph)
        else:
            made = make_schedule(self.structure.name, graph, self.main.costs, self.devices, microbatches)
        validate(made, graph, microbatches, self.devices)
        return made

    def predict(self, microbatches: int) -> Timing:
        """When everything would run, and each device's peak."""
        graph = self.main.steps.graph
        return simulate_time(self.schedule(graph, microbatches), graph, self.main.costs)


def lower_pipeline(
    joint: JointGraph,
    options: Options,
    pipelining: Pipelining,
    registered_syncs: Collection[Any] = (),
    training: bool = True,
    share: float = 1.0,
    like: Structure | None = None,
    workspaces: Mapping[str, int] | None = None,
) -> LoweredPipeline:
    """Run the passes and decide on stages, what is recomputed, and the schedule.

    Args:
        joint: a captured graph of one microbatch; it is rewritten.
        options: the user's.
        pipelining: the user's.
        registered_syncs: operators that the user declared to force a host sync.
        training: whether the graph has a backward.
        share: of the budget that may be used.
        like: how the graph of another microbatch of the same step was cut.
        workspaces: what operators whose needs depend on data have been seen to allocate for themselves, by name.

    Raises:
        InfeasibleBudgetError: some device needs more than the budget at the least.
        InvalidScheduleError: a given schedule does not fit the stages.
        ValueError: a stage name that does not exist in the model.
    """
    prepared = prepare(joint, options, registered_syncs, workspaces)
    names = [pipelining.schedule] if isinstance(pipelining.schedule, str) else ["given"]
    if like is not None:
        names = [like.name]
    elif names == ["auto"]:
        names = (
            [name for name in SCHEDULES if name != "roundpipe" or options.stages == "auto"] if training else ["gpipe"]
        )
    best: tuple[float, LoweredPipeline] | None = None
    refused: InfeasibleBudgetError | None = None
    for name in names:
        spare = dataclasses.replace(prepared, joint=prepared.joint.copy()) if len(names) > 1 else prepared
        try:
            tried = _lower_named(spare, options, pipelining, name, training, share, like)
        except InfeasibleBudgetError as error:
            refused = error if refused is None or error.minimum < refused.minimum else refused
            continue
        timing = tried.predict(pipelining.microbatches)
        log.info("schedule %s: %.3f ms, bubble %.1f %%", name, timing.makespan * 1e3, 100 * timing.bubble)
        if best is None or timing.makespan < best[0]:
            best = timing.makespan, tried
    if isinstance(prepared.costs, MeasuredCosts):
        prepared.costs.save()
    if best is None:
        assert refused is not None
        raise refused
    log.info("%s", best[1].main.lowered.plan)
    return best[1]


def _lower_named(
    prepared: Prepared,
    options: Options,
    pipelining: Pipelining,
    name: str,
    training: bool,
    share: float,
    like: Structure | None,
) -> LoweredPipeline:
    given = pipelining.schedule if isinstance(pipelining.schedule, Schedule) else None
    if given is not None and training:
        stages: int | str | tuple[str, ...] = options.stages
        if stages == "auto":
            forwards = [order[order[:, 0] == 0, 1] for order in given.orders]
            stages = 1 + max((int(own.max()) for own in forwards if len(own)), default=0)
    elif options.stages == "auto":
        stages = pipelining.workers * (2 if name == "interleaved" else 1)
    else:
        stages = options.stages
    asked = dataclasses.replace(options, stages=stages)
    devices = pipelining.workers
    name = "gpipe" if not training else name
    choosers = CHOOSERS
    cut: Rounds | tuple[int, ...]
    if name == "roundpipe":
        joint, segments, cuts, cut = _cut_rounds(prepared.joint, pipelining, like)
        choosers = {**CHOOSERS, "full": keep_slot_inputs}
    else:
        joint, segments, cuts = cut_as_asked(prepared.joint, asked, prepared.costs)
        if like is not None and like.segments == len(segments) and not isinstance(like.cut, Rounds):
            joint, cuts = stages_of_starts(joint, like.cut, len(segments))
        cut = tuple(stage.first for stage in cuts)
    structure = Structure(name, len(segments), cut)
    setting = Setting(asked, prepared.device, prepared.compiler, prepared.costs, segments, cuts, share)
    split = name == "zero_bubble" or (given is not None and _splits(given))
    if not training:
        only = _variant(emit(joint, setting), setting)
        return LoweredPipeline(only, only, structure, None, devices)
    if pipelining.checkpoint is None:
        budget = asked_budget(joint, options, prepared.device)
        if budget is not None:
            return _within(joint, setting, split, structure, given, pipelining, budget)
    kinds = {"always": ("full", "full"), "never": ("none", "none"), "except_last": ("full", "none")}
    main, last = kinds[pipelining.checkpoint or "never"]
    spare = joint.copy() if last != main else None
    setting = dataclasses.replace(setting, options=dataclasses.replace(asked, recompute=main))
    first = _variant(emit(joint, setting, chooser=choosers[main], split=split), setting)
    other = first
    if spare is not None:
        other = _variant(emit(spare, setting, chooser=choosers[last], split=split), setting)
    return LoweredPipeline(first, other, structure, given, devices)


def _variant(lowered: Lowered, setting: Setting) -> Variant:
    steps = steps_of(lowered)
    granularity = allocation_granularity(setting.device)
    return Variant(lowered, steps, step_costs(lowered, steps, setting.costs.transfer_seconds, granularity))


def _splits(schedule: Schedule) -> bool:
    return schedule.only(Kind.BACKWARD_INPUT).size > 0


def _cut_rounds(
    joint: JointGraph, pipelining: Pipelining, like: Structure | None
) -> tuple[JointGraph, list[Segment], list[StageCut], Rounds]:
    joint, segments = cut_segments(joint, region_bounds(joint))
    if like is not None and like.segments == len(segments) and isinstance(like.cut, Rounds):
        chosen = like.cut
    else:
        chosen = fit_rounds(
            [segment.forward_seconds for segment in segments],
            [segment.backward_seconds for segment in segments],
            pipelining.checkpoint in ("always", "except_last"),
            pipelining.workers,
            pipelining.microbatches,
        )
    joint, cuts = cut_rounds(joint, chosen)
    return joint, segments, cuts, chosen


def _within(
    joint: JointGraph,
    setting: Setting,
    split: bool,
    structure: Structure,
    given: Schedule | None,
    pipelining: Pipelining,
    budget: int | float,
) -> LoweredPipeline:
    """The plan that recomputes least among those with which every device stays within the budget.

    Plans are those that planning for one microbatch finds. Their peaks in the pipeline are not known before their
    modules are emitted and the schedule is simulated; they fall along with those of one microbatch, so the plan is
    found by bisection.
    """
    granularity = allocation_granularity(setting.device)
    operations = read_operations(joint, len(setting.segments), granularity, setting.compiler == "eager")
    candidates = search(Blocks(operations), _LEVELS).candidates
    frontier = tuple((candidate.peak.bytes, candidate.seconds) for candidate in candidates)
    tried: dict[int, tuple[int, LoweredPipeline]] = {}

    def attempt(index: int) -> tuple[int, LoweredPipeline]:
        if index not in tried:
            own = joint.copy()
            mapped = read_operations(own, len(setting.segments), granularity, setting.compiler == "eager")
            # Storages have the same numbers in every copy of a graph.
            candidate = work_out(Blocks(mapped), candidates[index].schedule.choice)
            own = follow_schedule(own, candidate.schedule.backward, setting.costs)
            chosen = Chosen(candidate, candidate.peak.bytes, mapped, frontier)
            only = _variant(emit(own, setting, chosen=chosen, split=split), setting)
            pipeline = LoweredPipeline(only, only, structure, given, pipelining.workers)
            tried[index] = max(pipeline.predict(pipelining.microbatches).peak_bytes), pipeline
        return tried[index]

    lowest = len(candidates) - 1
    if isinstance(budget, float):
        limit = limit_of(budget, min(attempt(lowest)[0], attempt(0)[0]), attempt(0)[0])
    else:
        limit = budget
    limit = int(limit * setting.share)
    low, high = 0, lowest
    while low < high:
        middle = (low + high) // 2
        if attempt(middle)[0] <= limit:
            high = middle
        else:
            low = middle + 1
    peak, pipeline = attempt(low)
    if peak > limit:
        peak, pipeline = min(tried.values(), key=lambda item: item[0])
    if peak > limit and isinstance(budget, int):
        raise InfeasibleBudgetError(
            f"memory_budget of {limit} bytes ({bytes_text(limit)}) a device cannot be met: with schedule "
            f"{structure.name!r}, {pipelining.workers} devices and {pipelining.microbatches} microbatches, the device "
            f"that needs most needs at least {peak} bytes ({bytes_text(peak)}). Use more and smaller microbatches, "
            "more devices, another schedule, or a budget of at least the minimum.",
            peak,
        )
    return dataclasses.replace(pipeline, budget=max(limit, peak))
