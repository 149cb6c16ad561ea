"""Lowering for a pipeline: stages for devices, steps with their costs, and the schedule that fits the budget.

The passes are those of every other compilation. What differs is how a graph is cut (one stage a device, several, or
RoundPipe's slots), that the backward may be split, and that plans are judged by simulating the schedule: how long a
step takes, and how many bytes each device holds with the microbatches in flight. ::

    for each schedule that was asked for (one; with "auto" all)         _cut_elsewhere
        for each limit on an offloaded model's weights                  until one fits
            with stages in pieces too where values may leave            _whole_or_in_pieces
            cut the graph for the schedule                              cut_for_schedule
            choose what is recomputed:                                  _for_schedule
                inference                                               nothing
                checkpoint="always", "except_last", "never"             a save policy
                a budget                                                within_budget

Within a budget all of it is done for the graph as it is, and then in tiles (:mod:`roundpipe_fx.planner.search`).
Where devices are yet to be divided, all of it is done for some divisions (:mod:`roundpipe_fx.planner.divide_devices`).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundpipe_fx.analysis.cost import MeasuredCosts
from roundpipe_fx.budget import Found, Infeasible, Result, first_found
from roundpipe_fx.compiler.emit import emit, emit_by_policy
from roundpipe_fx.compiler.operations_in_tiles import compute_least_bytes
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.collectives import refuse_distributed, refuse_other_groups
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.options import Options
from roundpipe_fx.passes.entry import PassLevel
from roundpipe_fx.pipeline.host_memory import check_host_memory, host_budget_of, host_memory_of
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline, Variant, make_variant
from roundpipe_fx.pipeline.settings import Pipelining, Structure
from roundpipe_fx.planner.cut_for_schedule import CutGraph, cut_for_schedule, weight_limits
from roundpipe_fx.planner.divide_devices import (
    NoDivisionError,
    enumerate_divisions,
    lower_divided,
    settings_of_division,
)
from roundpipe_fx.planner.evaluation import Candidate, ScheduleEvaluation, Space, evaluate_schedule
from roundpipe_fx.planner.judged_by_code import can_read_code
from roundpipe_fx.planner.lower import SAVE_POLICIES, requested_budget, run_common_passes
from roundpipe_fx.planner.pipeline_by_code import judge_pipeline, search_by_code
from roundpipe_fx.planner.schedule_within_budget import plan_schedule
from roundpipe_fx.planner.search import prefer_finer_stages, search
from roundpipe_fx.planner.segment_costs import segment_costs
from roundpipe_fx.planner.stages_in_pieces import can_divide_stages
from roundpipe_fx.planner.step_bound import Division, StepBounds
from roundpipe_fx.planner.with_host import host_tier_of_step
from roundpipe_fx.remat.choose import Bottleneck, Unmet
from roundpipe_fx.remat.save_policy import SavePolicy, save_slot_inputs
from roundpipe_fx.schedules import SCHEDULES, ScheduleSpec
from roundpipe_fx.schedules.registry import default_schedule

log = logging.getLogger(__name__)

_VARIANTS = {"always": ("full", "full"), "never": ("none", "none"), "except_last": ("full", "none")}
"""Save policies of all microbatches but the last, and of the last one, by the option ``checkpoint``."""


def lower_pipeline(
    joint: JointGraph,
    options: Options,
    pipelining: Pipelining,
    registered_syncs: Collection[Any] = (),
    training: bool = True,
    share: float = 1.0,
    like: Structure | None = None,
    forwards_before_backwards: bool = False,
    workspaces: Mapping[str, int] | None = None,
    unread: frozenset[int] = frozenset(),
    may_be_unread: frozenset[int] = frozenset(),
) -> Result[LoweredPipeline]:
    """Run the passes and decide on stages, what is recomputed, and the schedule.

    Args:
        joint: a captured graph of one microbatch; it is rewritten.
        registered_syncs: operators that the user declared to force a host sync.
        training: whether the graph has a backward.
        share: of the budget that may be used.
        like: how the graph of another microbatch of the same step was cut.
        forwards_before_backwards: whether all forwards run before all backwards, with a loss outside between them.
        workspaces: bytes that operators with data-dependent needs have been seen to allocate internally, by name.
        unread: numbers of outputs that are assumed to be dropped by the caller without having been read.
        may_be_unread: numbers of outputs that may be assumed so, where the budget cannot be met otherwise.

    Raises:
        DistributedTensorError: the model is distributed over processes.
        HostMemoryError: an offloaded model needs more than the host has.
        InvalidScheduleError: a given schedule does not fit the stages.
        NoDivisionError: devices are to be divided and cannot be.
        ValueError: a stage name that does not exist in the model.
    """
    # Collectives of the model's own are only right where all ranks of a group run the same graph.
    if pipelining.elsewhere or pipelining.tensor_parallel > 1:
        refuse_other_groups(joint, pipelining.tensor_parallel)
    else:
        refuse_distributed(joint, pipelining.workers)
    if pipelining.undivided is not None:
        return _lower_undivided(joint, options, pipelining, registered_syncs, training, forwards_before_backwards)
    joint, setting = run_common_passes(
        joint,
        options,
        registered_syncs,
        workspaces,
        training,
        pipelining.microbatches,
        network=pipelining.network,
    )
    setting = dataclasses.replace(setting, share=share)
    specs = [like.schedule] if like is not None else _schedules_to_try(options, pipelining, training)
    ways = _Lowering(pipelining=pipelining, like=like, forwards_before_backwards=forwards_before_backwards)
    asked = requested_budget(joint, options, setting.device) if training and pipelining.checkpoint is None else None
    joint, setting = _leave_out_unread(joint, setting, unread)
    result = _search_schedules(joint, setting, specs, ways, asked)
    # Without a plan the caller is assumed not to read outputs, which a step may prove wrong.
    if isinstance(result, Infeasible) and may_be_unread - unread:
        joint, setting = _leave_out_unread(joint, setting, may_be_unread)
        result = _search_schedules(joint, setting, specs, ways, asked)
    if isinstance(result, Infeasible):
        return Infeasible(minimum=result.minimum, bottleneck=result.bottleneck.text)
    if isinstance(setting.costs, MeasuredCosts):
        setting.costs.save()
    best, timing = result.value.emitted, result.value.timing
    if pipelining.offloaded:
        assumed = pipelining.elsewhere and pipelining.host_budget is None
        check_host_memory(host_memory_of(best, timing, pipelining), host_budget_of(best, pipelining), assumed)
    return Found(best)


def _leave_out_unread(joint: JointGraph, setting: Setting, outputs: frozenset[int]) -> tuple[JointGraph, Setting]:
    """Leave outputs of a graph out that the caller is assumed not to read."""
    setting = setting.with_decisions(unread=setting.context.unread | outputs)
    return setting.run(dataclasses.replace(joint, dropped=joint.dropped | outputs), PassLevel.OUTPUTS), setting


def _search_schedules(
    joint: JointGraph, setting: Setting, specs: Sequence[ScheduleSpec], ways: _Lowering, asked: int | float | None
) -> Found[ScheduleEvaluation] | Unmet:
    """The quickest pipeline within a budget.

    Args:
        specs: the schedules to choose from.
        asked: the budget; ``None``: there is none.
    """
    pipelining = ways.pipelining

    def planned(
        graph: JointGraph, setting: Setting, budget: int | float | None, limit: int | None
    ) -> Found[ScheduleEvaluation] | Unmet:
        # Before a search: one operation that needs more than the limit refutes every plan.
        least = None if limit is None else compute_least_bytes(graph, setting)
        if least is not None and limit is not None and least.bytes > limit:
            return Infeasible(minimum=least.bytes, bottleneck=Bottleneck(operation=least.operation, live=least.live))
        return _lower_for_schedules(graph.copy(), specs, setting, ways, budget)

    tier = functools.partial(host_tier_of_step, pipelining=pipelining)
    runs = pipelining.microbatches if pipelining.workers == 1 else None
    space = Space(planned=planned, widest_first=True, tier=tier, runs=runs)

    def within(budget: int | float) -> Found[ScheduleEvaluation] | Unmet:
        return search(joint, budget, setting, space, pays=ways.like is None)

    # Plans of several processes must be alike, and code may depend on the machine.
    follows = can_read_code(setting) and not pipelining.over_processes
    if asked is not None:
        return search_by_code(within, asked, setting.share) if follows else within(asked)
    result = planned(joint, setting, None, None)
    return Found(judge_pipeline(result.value)) if follows and isinstance(result, Found) else result


def _lower_undivided(
    joint: JointGraph,
    options: Options,
    pipelining: Pipelining,
    registered_syncs: Collection[Any],
    training: bool,
    forwards_before_backwards: bool,
) -> Result[LoweredPipeline]:
    """The pipeline of the division of devices with the shortest step.

    Raises:
        NoDivisionError: there is none, or nothing is trained.
    """
    undivided = pipelining.undivided
    assert undivided is not None and pipelining.between is not None and not isinstance(options.stages, tuple)
    if not training:
        raise NoDivisionError(
            f"mesh_shape={undivided.total}: devices are divided for training, and no gradient is computed here. Give "
            "the shape, as mesh_shape=(replicas, devices of each)."
        )
    prepared, setting = run_common_passes(
        joint.copy(), options, registered_syncs, None, training, undivided.microbatches, network=pipelining.network
    )
    costs = segment_costs(prepared, setting)
    names = [spec.name for spec in _schedules_to_try(options, pipelining, training)]
    divisions = enumerate_divisions(undivided, costs.count, options.stages, names, pipelining.sharded)
    # The budget bounds a device's step, or its weights as well, as the option says.
    budget = options.memory_budget
    bounds = StepBounds(
        costs=costs,
        microbatches=undivided.microbatches,
        network=pipelining.between,
        memory=budget if isinstance(budget, int) else math.inf,
        with_weights=pipelining.budget_has_weights,
        optimizer_share=pipelining.optimizer_share,
        halves=forwards_before_backwards,
    )

    def lower(division: Division, tiles: bool) -> Result[LoweredPipeline]:
        division_options = dataclasses.replace(
            options, stages=division.stages, tiling=options.tiling if tiles else "never"
        )
        with warnings.catch_warnings():
            # In tiles there are fewer segments; how many stages there are was not the user's choice.
            warnings.filterwarnings("ignore", "roundpipe_fx: stages=")
            return lower_pipeline(
                joint.copy(),
                division_options,
                settings_of_division(pipelining, division),
                registered_syncs,
                forwards_before_backwards=forwards_before_backwards,
            )

    return lower_divided(undivided, divisions, bounds, lower)


def _schedules_to_try(options: Options, pipelining: Pipelining, training: bool) -> Sequence[ScheduleSpec]:
    if isinstance(pipelining.schedule, ScheduleSpec):
        return [pipelining.schedule]
    if pipelining.schedule is None:
        return [default_schedule(pipelining.offloaded, training=True)]
    if not training:
        return [default_schedule(offloaded=False, training=False)]
    # Who dispatches runs any stage on any device, and a process has the parameters of its own stages only.
    dispatched = options.stages == "auto" and not pipelining.over_processes
    return [spec for spec in SCHEDULES.values() if spec.auto and (not spec.dispatches or dispatched)]


@dataclass(frozen=True, kw_only=True)
class _Lowering:
    """Functions that lower graphs for schedules.

    Attributes:
        like: how the graph of another microbatch of the same step was cut.
        forwards_before_backwards: whether all forwards run before all backwards.
    """

    pipelining: Pipelining
    like: Structure | None
    forwards_before_backwards: bool

    def pipeline(self, cut: CutGraph, main: Variant, last: Variant) -> LoweredPipeline:
        """The pipeline of a graph that is cut."""
        return LoweredPipeline(
            main=main,
            last=last,
            structure=cut.structure,
            staged=cut.joint,
            pipelining=self.pipelining,
            forwards_before_backwards=self.forwards_before_backwards and cut.setting.context.training,
        )


def _lower_for_schedules(
    joint: JointGraph, specs: Sequence[ScheduleSpec], setting: Setting, ways: _Lowering, budget: int | float | None
) -> Found[ScheduleEvaluation] | Unmet:
    """The quickest within the budget: cut for each of some schedules, and for limits on an offloaded model's weights.

    Args:
        joint: the graph of a microbatch; it is rewritten.
        setting: what lowering knows besides the graph.
        ways: how graphs are lowered.
        budget: bytes or a share; ``None``: a policy decides what is recomputed.
    """
    pipelining, like = ways.pipelining, ways.like
    best: Found[ScheduleEvaluation] | None = None
    refused: list[Unmet] = []
    limits: Sequence[int | None] = [None]
    if pipelining.offloaded and like is None:
        limits = weight_limits(setting, budget or requested_budget(joint, setting.options, setting.device))
    # Schedules that do not dispatch have no limits on weights.
    candidates = [(spec, limit) for spec in specs for limit in (limits if spec.dispatches else [None])]
    fits: set[str] = set()
    for spec, limit in candidates:
        # Limits are tried in order until a schedule fits.
        if spec.name in fits:
            continue
        spare = joint.copy() if len(candidates) > 1 else joint
        lower = functools.partial(_lower_for_schedule, setting=setting, ways=ways, spec=spec, weight_limit=limit)
        if budget is not None and like is None and can_divide_stages(setting, pipelining, spec):
            tried = _try_stages_in_pieces(spare, lower, setting, budget)
        else:
            tried = lower(spare, budget=budget)
        if isinstance(tried, Infeasible):
            # Limits on weights are shares of the budget: the least that can be met must not depend on what was asked.
            refused += [tried] if limit is None else []
            continue
        fits.add(spec.name)
        timing = tried.value.timing
        log.info("schedule %s: %.3f ms, bubble %.1f %%", spec.name, timing.makespan * 1e3, 100 * timing.bubble)
        if best is None or tried.value.seconds < best.value.seconds:
            best = tried
    return first_found([best] if best is not None else refused)


def _try_stages_in_pieces(
    joint: JointGraph,
    lower: Callable[..., Found[ScheduleEvaluation] | Unmet],
    setting: Setting,
    budget: int | float,
) -> Found[ScheduleEvaluation] | Unmet:
    """A pipeline with its stages in pieces if whole ones recompute, or do not fit, and the step is shorter so."""
    whole = lower(joint.copy(), budget=budget)

    def in_pieces() -> Found[ScheduleEvaluation] | Unmet | None:
        limit = budget
        if isinstance(whole, Found) and isinstance(budget, float):  # a share of what whole stages need, as bytes
            assert whole.value.emitted.budget is not None
            limit = math.ceil(whole.value.emitted.budget / setting.share)
        pieces = lower(joint, budget=limit, in_pieces=True)
        if isinstance(pieces, Infeasible):
            return pieces
        if isinstance(whole, Found) and pieces.value.emitted.offload is None:
            return None
        plan = dataclasses.replace(
            pieces.value.emitted, allowed=pieces.value.emitted.allowed if limit is budget else None
        )
        return Found(dataclasses.replace(pieces.value, emitted=plan))

    return prefer_finer_stages(whole, in_pieces)


def _lower_for_schedule(
    joint: JointGraph,
    *,
    setting: Setting,
    ways: _Lowering,
    spec: ScheduleSpec,
    weight_limit: int | None,
    budget: int | float | None,
    in_pieces: bool = False,
) -> Found[ScheduleEvaluation] | Unmet:
    """The pipeline for one schedule.

    Args:
        joint: the graph of a microbatch; it is rewritten.
        setting: what lowering knows besides the graph.
        ways: how graphs are lowered.
        weight_limit: bytes that an offloaded model's weights may take on a device.
        budget: bytes or a share; ``None``: a policy decides what is recomputed.
        in_pieces: whether stages are in pieces (:mod:`roundpipe_fx.planner.stages_in_pieces`).
    """
    pipelining = ways.pipelining
    cut = cut_for_schedule(joint, setting, pipelining, spec, ways.like, weight_limit, in_pieces)
    if not setting.context.training:
        only = make_variant(emit(cut.joint, cut.setting), cut.setting, pipelining)
        return Found(evaluate_schedule(Candidate(SAVE_POLICIES["none"]), ways.pipeline(cut, only, only)))
    stage_inputs = save_slot_inputs if spec.dispatches else SAVE_POLICIES["full"]
    if budget is not None:
        split, fewer_weights = spec.splits_backward, weight_limit is not None
        return plan_schedule(cut, ways.pipeline, pipelining, split, budget, stage_inputs, fewer_weights)
    return Found(_lower_by_policy(cut, ways, spec.splits_backward, {**SAVE_POLICIES, "full": stage_inputs}))


def _lower_by_policy(
    cut: CutGraph, ways: _Lowering, split: bool, policies: Mapping[str, SavePolicy]
) -> ScheduleEvaluation:
    """The pipeline that saves what the option ``checkpoint`` says."""
    main, last = _VARIANTS[ways.pipelining.checkpoint or "never"]
    setting = cut.setting.with_decisions(options=dataclasses.replace(cut.setting.options, recompute=main))

    def variant(recompute: str) -> Variant:
        lowered = emit_by_policy(cut.joint.copy(), setting, policies[recompute], split=split, sums=True)
        return make_variant(lowered, setting, ways.pipelining)

    first = variant(main)
    pipeline = ways.pipeline(cut, first, first if last == main else variant(last))
    return evaluate_schedule(Candidate(policies[main]), pipeline)
