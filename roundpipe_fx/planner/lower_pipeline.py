"""Lowering for a pipeline: stages for devices, steps with their costs, and the schedule that fits the budget.

The passes are those of every other compilation. What differs is how a graph is cut (one stage a device, several, or
RoundPipe's slots), that the backward may be split, and that plans are judged by simulating the schedule: how long a
step takes, and how many bytes each device holds with the microbatches in flight. ::

    for the graph, then with more and more of it in tiles               _within_budget_or_in_tiles
        for each schedule that was asked for (one; with "auto" all)     _best_of
            for each limit on an offloaded model's weights                  until one fits
                with stages in pieces too where values may leave        in_pieces_if_shorter
                cut the graph for the schedule                          cut_for_schedule
                choose what is recomputed:
                    inference                                           nothing
                    checkpoint="always", "except_last", "never"         a save policy
                    a budget                                            within_budget
                simulate the schedule
    with tiling="auto": the same in the tiles that may be best          _shortest

Where devices are yet to be divided, all of it is done for some divisions (:mod:`roundpipe_fx.planner.divide_devices`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from roundpipe_fx.analysis.cost import MeasuredCosts
from roundpipe_fx.analysis.tiling import TileRegions
from roundpipe_fx.budget import Found, Infeasible, Result, first_found
from roundpipe_fx.compiler.emit import emit, emit_by_policy
from roundpipe_fx.compiler.operations_in_tiles import least_bytes_of, summed, tiled
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.collectives import refuse_distributed, refuse_other_groups
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.options import Options
from roundpipe_fx.pipeline.host_memory import check_host_memory, host_budget_of, host_memory_of
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline, Variant, variant_of
from roundpipe_fx.pipeline.settings import Pipelining, Structure
from roundpipe_fx.planner.class_tiles import class_regions
from roundpipe_fx.planner.cut_for_schedule import CutGraph, cut_for_schedule, weight_limits
from roundpipe_fx.planner.divide_devices import NoDivisionError, divisions_of, lower_divided, pipelining_of
from roundpipe_fx.planner.lower import SAVE_POLICIES, asked_budget, prepare
from roundpipe_fx.planner.schedule_within_budget import within_budget
from roundpipe_fx.planner.segment_costs import segment_costs
from roundpipe_fx.planner.segments_in_tiles import tilings_by_segment
from roundpipe_fx.planner.stages_in_pieces import in_pieces_if_shorter, may_be_in_pieces
from roundpipe_fx.planner.step_bound import Division, StepBounds
from roundpipe_fx.planner.tiling import tile_sequence
from roundpipe_fx.remat.save_policy import SavePolicy, save_slot_inputs
from roundpipe_fx.schedules import SCHEDULES, ScheduleSpec
from roundpipe_fx.schedules.registry import default_schedule

__all__ = ["lower_pipeline"]

log = logging.getLogger(__name__)

_VARIANTS = {"always": ("full", "full"), "never": ("none", "none"), "except_last": ("full", "none")}
"""Save policies of all microbatches but the last, and of the last one, by the option ``checkpoint``."""
_TRIED = 3
"""So many of the tiles that the chain of segments finds best are tried where tiles are taken wherever they pay."""


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
) -> Result[LoweredPipeline]:
    """Run the passes and decide on stages, what is recomputed, and the schedule.

    Args:
        joint: a captured graph of one microbatch; it is rewritten.
        options: the user's.
        pipelining: the user's.
        registered_syncs: operators that the user declared to force a host sync.
        training: whether the graph has a backward.
        share: of the budget that may be used.
        like: how the graph of another microbatch of the same step was cut.
        forwards_before_backwards: whether all forwards run before all backwards, with a loss outside between them.
        workspaces: bytes that operators with data-dependent needs have been seen to allocate internally, by name.

    Raises:
        DistributedTensorError: the model is distributed over processes.
        HostMemoryError: an offloaded model needs more than the host has.
        InvalidScheduleError: a given schedule does not fit the stages.
        NoDivisionError: devices are to be divided and cannot be.
        ValueError: a stage name that does not exist in the model.
    """
    if pipelining.elsewhere or pipelining.tensor_parallel > 1:
        refuse_other_groups(joint, pipelining.tensor_parallel)
    else:
        refuse_distributed(joint, pipelining.workers)
    if pipelining.undivided is not None:
        return _lower_undivided(joint, options, pipelining, registered_syncs, training, forwards_before_backwards)
    joint, setting = prepare(
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

    def planned(graph: JointGraph, setting: Setting = setting) -> Result[LoweredPipeline]:
        return _best_of(graph, specs, setting, pipelining, like, forwards_before_backwards)

    result = _within_budget_or_in_tiles(joint, setting, pipelining, planned)
    if isinstance(result, Infeasible):
        return result
    best = result.value
    if options.tiling == "auto" and training and like is None:
        best = _shortest(joint, setting, pipelining, best, planned)
    if isinstance(setting.costs, MeasuredCosts):
        setting.costs.save()
    if pipelining.offloaded:
        timing = best.predict(pipelining.microbatches)
        check_host_memory(host_memory_of(best, timing, pipelining), host_budget_of(best, pipelining))
    return Found(best)


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
    prepared, setting = prepare(
        joint.copy(), options, registered_syncs, None, training, undivided.microbatches, network=pipelining.network
    )
    costs = segment_costs(prepared, setting)
    names = [spec.name for spec in _schedules_to_try(options, pipelining, training)]
    divisions = divisions_of(undivided, costs.count, options.stages, names, pipelining.sharded)
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
                pipelining_of(pipelining, division),
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


def _within_budget_or_in_tiles(
    joint: JointGraph,
    setting: Setting,
    pipelining: Pipelining,
    planned: Callable[[JointGraph], Result[LoweredPipeline]],
) -> Result[LoweredPipeline]:
    """The first pipeline within the budget: as the graph is, or with more and more of its regions in tiles.

    No schedule is searched for where one operation alone needs more than the budget, unless that is so in any tiles. If
    there is none, the result is that of the attempt that needs least.
    """
    budget = asked_budget(joint, setting.options, setting.device)
    bounded = setting.context.training and pipelining.checkpoint is None and isinstance(budget, int)
    if not bounded or setting.options.tiling == "never":
        return planned(joint.copy())
    assert budget is not None
    limit = int(budget * setting.share)
    tried = (
        planned(graph)
        for graph in _as_it_is_and_in_tiles(joint, setting)
        if least_bytes_of(graph, setting).bytes <= limit
    )
    first = next(tried, None)
    if first is not None:
        return first_found(itertools.chain([first], tried))
    return first_found(map(planned, _as_it_is_and_in_tiles(joint, setting)))


def _shortest(
    joint: JointGraph,
    setting: Setting,
    pipelining: Pipelining,
    met: LoweredPipeline,
    planned: Callable[[JointGraph, Setting], Result[LoweredPipeline]],
) -> LoweredPipeline:
    """A pipeline in the tiles that make its step shortest, of those that the chain of segments finds best.

    The chain counts the whole model with one microbatch. The first device of a pipeline holds about as much: one part
    of the model, with as many microbatches in flight as there are parts. The simulated schedule decides.

    Args:
        joint: the graph as it was.
        setting: what else there is to know.
        pipelining: the user's settings.
        met: a pipeline within the budget, which is returned if no other one is shorter.
        planned: plans a graph.
    """
    if met.budget is None:
        return met
    options = setting.options
    if isinstance(options.memory_budget, float):  # a share of what this graph needs, as bytes
        budget = math.ceil(met.budget / setting.share)
        setting = setting.knowing(options=dataclasses.replace(options, memory_budget=budget))
    graph = summed(joint, setting)
    regions = TileRegions(graph).as_wide_as(0)
    best = met.predict(pipelining.microbatches).makespan, met
    for _, tiles in itertools.islice(tilings_by_segment(graph, regions, met.budget, setting), _TRIED):
        tried = planned(tiled(graph, tiles, setting) if tiles else joint.copy(), setting)
        if isinstance(tried, Infeasible):
            continue
        makespan = tried.value.predict(pipelining.microbatches).makespan
        log.info("in other tiles: %.3f ms after %.3f", makespan * 1e3, best[0] * 1e3)
        if makespan < best[0]:
            best = makespan, tried.value
    return best[1]


def _as_it_is_and_in_tiles(joint: JointGraph, setting: Setting) -> Iterator[JointGraph]:
    yield joint.copy()
    graph = summed(joint, setting)
    heads = class_regions(graph, setting.costs)
    for tiles in tile_sequence(graph, heads, lambda joint, tiles: tiled(joint, tiles, setting)):
        yield tiled(graph, tiles, setting)


def _best_of(
    joint: JointGraph,
    specs: Sequence[ScheduleSpec],
    setting: Setting,
    pipelining: Pipelining,
    like: Structure | None,
    forwards_before_backwards: bool,
) -> Result[LoweredPipeline]:
    """The quickest of some schedules within the budget."""
    best: tuple[float, Found[LoweredPipeline]] | None = None
    refused: list[Infeasible[str]] = []
    limits = weight_limits(joint, setting) if pipelining.offloaded and like is None else [None]
    candidates = [(spec, limit) for spec in specs for limit in (limits if spec.dispatches else [None])]
    fits: set[str] = set()
    for spec, limit in candidates:
        if spec.name in fits:
            continue
        spare = joint.copy() if len(candidates) > 1 else joint
        lower = functools.partial(
            _lower_for_schedule,
            pipelining=pipelining,
            spec=spec,
            like=like,
            forwards_before_backwards=forwards_before_backwards,
            weight_limit=limit,
        )
        if like is None and may_be_in_pieces(setting, pipelining, spec):
            tried = in_pieces_if_shorter(spare, lower, setting, pipelining.microbatches)
        else:
            tried = lower(spare, setting)
        if isinstance(tried, Infeasible):
            # Limits on weights are shares of the budget: the least that can be met must not depend on what was asked.
            refused += [tried] if limit is None else []
            continue
        fits.add(spec.name)
        timing = tried.value.predict(pipelining.microbatches)
        log.info("schedule %s: %.3f ms, bubble %.1f %%", spec.name, timing.makespan * 1e3, 100 * timing.bubble)
        if best is None or timing.makespan < best[0]:
            best = timing.makespan, tried
    return first_found([best[1]] if best is not None else refused)


def _lower_for_schedule(
    joint: JointGraph,
    setting: Setting,
    pipelining: Pipelining,
    spec: ScheduleSpec,
    like: Structure | None,
    forwards_before_backwards: bool,
    weight_limit: int | None,
    in_pieces: bool = False,
) -> Result[LoweredPipeline]:
    """The pipeline for one schedule.

    Args:
        joint: the graph of a microbatch; it is rewritten.
        setting: what lowering knows besides the graph.
        pipelining: the user's.
        spec: of the schedule.
        like: how the graph of another microbatch of the same step was cut.
        forwards_before_backwards: whether all forwards run before all backwards.
        weight_limit: bytes that an offloaded model's weights may take on a device.
        in_pieces: whether stages are in pieces (:mod:`roundpipe_fx.planner.stages_in_pieces`).
    """
    cut = cut_for_schedule(joint, setting, pipelining, spec, like, weight_limit, in_pieces)
    if not setting.context.training:
        only = variant_of(emit(cut.joint, cut.setting), cut.setting, pipelining)
        pipeline = LoweredPipeline(
            main=only,
            last=only,
            structure=cut.structure,
            staged=cut.joint,
            pipelining=pipelining,
            forwards_before_backwards=False,
        )
        return Found(pipeline)
    split = spec.splits_backward
    stage_inputs = save_slot_inputs if spec.dispatches else SAVE_POLICIES["full"]
    if pipelining.checkpoint is None:
        budget = asked_budget(cut.joint, setting.options, setting.device)
        if budget is not None:
            fewer_weights = weight_limit is not None
            return within_budget(
                cut, pipelining, split, forwards_before_backwards, budget, stage_inputs, fewer_weights=fewer_weights
            )
    policies = {**SAVE_POLICIES, "full": stage_inputs}
    return Found(_by_policy(cut, pipelining, split, forwards_before_backwards, policies))


def _by_policy(
    cut: CutGraph,
    pipelining: Pipelining,
    split: bool,
    forwards_before_backwards: bool,
    policies: Mapping[str, SavePolicy],
) -> LoweredPipeline:
    """The pipeline that saves what the option ``checkpoint`` says."""
    main, last = _VARIANTS[pipelining.checkpoint or "never"]
    setting = cut.setting.knowing(options=dataclasses.replace(cut.setting.options, recompute=main))

    def variant(recompute: str) -> Variant:
        lowered = emit_by_policy(cut.joint.copy(), setting, policies[recompute], split=split, sums=True)
        return variant_of(lowered, setting, pipelining)

    first = variant(main)
    return LoweredPipeline(
        main=first,
        last=first if last == main else variant(last),
        structure=cut.structure,
        staged=cut.joint,
        pipelining=pipelining,
        forwards_before_backwards=forwards_before_backwards,
    )
