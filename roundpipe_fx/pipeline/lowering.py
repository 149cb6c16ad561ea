"""Lowering for a pipeline: stages for devices, steps with their costs, and the schedule that fits the budget.

The passes are those of every other compilation. What differs is how a graph is cut (one stage a device, several, or
RoundPipe's slots), that the backward may be split, and that plans are judged by simulating the schedule: how long a
step takes, and how many bytes each device holds with the microbatches that are in flight.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Any

from roundpipe_fx.analysis.cost import MeasuredCosts, tensor_bytes
from roundpipe_fx.budget import InfeasibleBudgetError, available_memory
from roundpipe_fx.compiler.lower import (
    SAVE_POLICIES,
    Prepared,
    Setting,
    asked_budget,
    cut_as_asked,
    emit,
    prepare,
    recompute_by_policy,
)
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, tensor_values
from roundpipe_fx.ir.options import Options
from roundpipe_fx.ir.segment import Segment, StageCut
from roundpipe_fx.passes.recompute_regions import region_bounds
from roundpipe_fx.passes.rounds import cut_rounds
from roundpipe_fx.passes.segments import cut_segments
from roundpipe_fx.passes.stages import stages_of_starts
from roundpipe_fx.passes.tied_gradients import split_tied_gradients
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline, Structure, Variant, variant_of
from roundpipe_fx.pipeline.same_segments import segment_starts, starts_like
from roundpipe_fx.pipeline.settings import SCHEDULES, Pipelining
from roundpipe_fx.pipeline.within_budget import within_budget
from roundpipe_fx.remat.save_policy import save_slot_inputs
from roundpipe_fx.schedules import (
    ActionKind,
    Schedule,
)
from roundpipe_fx.schedules.balance_offloaded_stages import Weights, balance_offloaded_stages
from roundpipe_fx.schedules.roundpipe_partition import RoundPipePartition, balance_roundpipe_stages

__all__ = ["lower_pipeline"]

log = logging.getLogger(__name__)

_WEIGHT_SHARES = (1 / 2, 1 / 4, 1 / 8)
"""Of the budget, for an offloaded model's weights and their gradients: the rest is for what is computed."""


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
        forwards_before_backwards: whether all forwards run before all backwards, with a loss outside between them.
        workspaces: what operators whose needs depend on data have been seen to allocate for themselves, by name.

    Raises:
        InfeasibleBudgetError: some device needs more than the budget at the least.
        InvalidScheduleError: a given schedule does not fit the stages.
        ValueError: a stage name that does not exist in the model.
    """
    prepared = prepare(joint, options, registered_syncs, workspaces)
    if training and pipelining.microbatches > 1:
        prepared = dataclasses.replace(prepared, joint=split_tied_gradients(prepared.joint))
    usual = "roundpipe" if pipelining.offloaded else "1f1b"
    names = ["given"] if isinstance(pipelining.schedule, Schedule) else [pipelining.schedule or usual]
    if like is not None:
        names = [like.name]
    elif names == ["auto"]:
        names = (
            [name for name in SCHEDULES if name != "roundpipe" or options.stages == "auto"] if training else ["gpipe"]
        )
    best: tuple[float, LoweredPipeline] | None = None
    refused: InfeasibleBudgetError | None = None
    limits = _weight_limits(prepared, options) if pipelining.offloaded and like is None else [None]
    ways = [(name, limit) for name in names for limit in (limits if name == "roundpipe" else [None])]
    fits: set[str] = set()
    for name, limit in ways:
        if name in fits:
            continue
        spare = dataclasses.replace(prepared, joint=prepared.joint.copy()) if len(ways) > 1 else prepared
        try:
            tried = _lower_named(
                spare, options, pipelining, name, training, share, like, forwards_before_backwards, limit
            )
        except InfeasibleBudgetError as error:
            # Limits on weights are shares of the budget: the least that can be met must not depend on what was asked.
            if limit is None:
                refused = error if refused is None or error.minimum < refused.minimum else refused
            continue
        fits.add(name)
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
    forwards_before_backwards: bool,
    weight_limit: int | None,
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
    if not training:
        name = "roundpipe" if pipelining.offloaded else "gpipe"
    policies = SAVE_POLICIES
    known = starts_like(prepared.joint, like.starts) if like is not None else None
    cut: RoundPipePartition | tuple[int, ...]
    if name == "roundpipe":
        joint, segments, cuts, cut = _cut_rounds(prepared, options, pipelining, like, known, training, weight_limit)
        policies = {**SAVE_POLICIES, "full": save_slot_inputs}
    else:
        whole = name in ("interleaved", "given")
        joint, segments, cuts = cut_as_asked(prepared.joint, asked, prepared.costs, whole, known)
        if like is not None and like.segments == len(segments) and not isinstance(like.cut, RoundPipePartition):
            joint, cuts = stages_of_starts(joint, like.cut, len(segments))
        cut = tuple(stage.first for stage in cuts)
    structure = Structure(name, len(segments), cut, segment_starts(joint))
    setting = Setting(asked, prepared.device, prepared.compiler, prepared.costs, segments, cuts, share)
    split = name == "zero_bubble" or (given is not None and _splits(given))
    if not training:
        only = variant_of(emit(joint, setting, training=False), setting, pipelining)
        return LoweredPipeline(only, only, structure, None, devices, False)
    if pipelining.checkpoint is None:
        budget = asked_budget(joint, options, prepared.device)
        if budget is not None:
            full = policies["full"]
            return within_budget(
                joint, setting, split, structure, given, pipelining, forwards_before_backwards, budget, full
            )
    kinds = {"always": ("full", "full"), "never": ("none", "none"), "except_last": ("full", "none")}
    main, last = kinds[pipelining.checkpoint or "never"]
    setting = dataclasses.replace(setting, options=dataclasses.replace(asked, recompute=main))

    def variant(recompute: str) -> Variant:
        own = recompute_by_policy(joint.copy(), policies[recompute], prepared.costs)
        return variant_of(emit(own, setting, split=split, sums=True), setting, pipelining)

    first = variant(main)
    return LoweredPipeline(
        first, first if last == main else variant(last), structure, given, devices, forwards_before_backwards
    )


def _splits(schedule: Schedule) -> bool:
    return schedule.only(ActionKind.BACKWARD_INPUT).size > 0


def _weight_limits(prepared: Prepared, options: Options) -> list[int | None]:
    """Bytes that an offloaded model's weights may take on a device, to be tried in turn; ``None``: as few as can be."""
    budget = asked_budget(prepared.joint, options, prepared.device)
    if isinstance(budget, float):
        return [None]
    if budget is None:
        budget = available_memory(prepared.device)
    return [*(int(budget * share) for share in _WEIGHT_SHARES), None]


def _cut_rounds(
    prepared: Prepared,
    options: Options,
    pipelining: Pipelining,
    like: Structure | None,
    known: list[int] | None,
    training: bool,
    weight_limit: int | None,
) -> tuple[JointGraph, list[Segment], list[StageCut], RoundPipePartition]:
    """Cut a graph into slots; those of an offloaded model begin where stages are asked to."""
    recompute = pipelining.checkpoint in ("always", "except_last")
    if options.stages == "auto" or not pipelining.offloaded:
        joint, segments = cut_segments(prepared.joint, region_bounds(prepared.joint), True, known)
        asked: list[StageCut] = []
    else:
        joint, segments, asked = cut_as_asked(prepared.joint, options, prepared.costs, True, known)
    forward = [segment.forward_seconds for segment in segments]
    backward = [segment.backward_seconds for segment in segments]
    devices, microbatches = pipelining.workers, pipelining.microbatches
    if like is not None and like.segments == len(segments) and isinstance(like.cut, RoundPipePartition):
        chosen = like.cut
    elif asked:
        runs = [(cut.first, cut.last) for cut in asked]
        chosen = RoundPipePartition(tuple(runs[:-1]), runs[-1], tuple(runs[-2::-1]) if training else ())
    elif pipelining.offloaded:
        weights = _weights_of(joint, len(segments), prepared.costs.host)
        seconds = backward if training else [0.0] * len(segments)
        chosen = balance_offloaded_stages(forward, seconds, recompute, devices, microbatches, weights, weight_limit)
    else:
        chosen = balance_roundpipe_stages(forward, backward, recompute, devices, microbatches)
    joint, cuts = cut_rounds(joint, chosen)
    return joint, segments, cuts, chosen


def _weights_of(joint: JointGraph, segments: int, bandwidth: float) -> Weights:
    """What segments read of the model's tensors."""
    numbers = {node: number for number, node in enumerate(joint.primals) if node in joint.parameters}
    reads: list[set[int]] = [set() for _ in range(segments)]
    for node in joint.computed():
        reads[node.meta[Mark.SEGMENT]].update(numbers[own] for own in node.all_input_nodes if own in numbers)
    sizes = {number: tensor_bytes(tensor_values(node)) for node, number in numbers.items()}
    return Weights([frozenset(own) for own in reads], sizes, bandwidth)
