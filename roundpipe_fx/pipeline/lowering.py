"""Lowering for a pipeline: stages for devices, steps with their costs, and the schedule that fits the budget.

The passes are those of every other compilation. What differs is how a graph is cut (one stage a device, several, or
RoundPipe's slots), that the backward may be split, and that plans are judged by simulating the schedule: how long a
step takes, and how many bytes each device holds with the microbatches that are in flight.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from roundpipe_fx.analysis.cost import MeasuredCosts, tensor_bytes
from roundpipe_fx.budget import InfeasibleBudgetError, available_memory
from roundpipe_fx.compiler.lower import (
    SAVE_POLICIES,
    asked_budget,
    emit,
    emit_by_policy,
    least_bytes_of,
    prepare,
    summed,
    tiled,
)
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.compiler.tiling import tile_sequence
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, tensor_values
from roundpipe_fx.ir.options import Options
from roundpipe_fx.passes.pipeline import PassLevel, stages_as_asked
from roundpipe_fx.pipeline.distributed import refuse_distributed
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
        DistributedTensorError: the model is distributed over processes.
        InfeasibleBudgetError: some device needs more than the budget at the least.
        InvalidScheduleError: a given schedule does not fit the stages.
        ValueError: a stage name that does not exist in the model.
    """
    refuse_distributed(joint, pipelining.workers)
    joint, setting = prepare(joint, options, registered_syncs, workspaces, training, pipelining.microbatches)
    setting = dataclasses.replace(setting, share=share)
    usual = "roundpipe" if pipelining.offloaded else "1f1b"
    names = ["given"] if isinstance(pipelining.schedule, Schedule) else [pipelining.schedule or usual]
    if like is not None:
        names = [like.name]
    elif names == ["auto"]:
        names = (
            [name for name in SCHEDULES if name != "roundpipe" or options.stages == "auto"] if training else ["gpipe"]
        )

    def planned(graph: JointGraph) -> LoweredPipeline:
        return _best_of(graph, names, setting, pipelining, like, forwards_before_backwards)

    best = _within_budget_or_in_tiles(joint, setting, pipelining, planned)
    if isinstance(setting.costs, MeasuredCosts):
        setting.costs.save()
    log.info("%s", best.main.lowered.plan)
    return best


def _within_budget_or_in_tiles(
    joint: JointGraph,
    setting: Setting,
    pipelining: Pipelining,
    planned: Callable[[JointGraph], LoweredPipeline],
) -> LoweredPipeline:
    """The first pipeline within the budget: as the graph is, or with more and more of its regions in tiles.

    No schedule is searched for where one operation alone needs more than the budget, unless that is so in any tiles.

    Raises:
        InfeasibleBudgetError: there is none; of all that was tried the one that needs least.
    """
    budget = asked_budget(joint, setting.options, setting.device)
    bounded = setting.context.training and pipelining.checkpoint is None and isinstance(budget, int)
    if not bounded or setting.options.tiling == "never":
        return planned(joint)
    assert budget is not None
    limit = int(budget * setting.share)
    refused: InfeasibleBudgetError | None = None
    for needs_more in (lambda graph: least_bytes_of(graph, setting).bytes > limit, lambda graph: False):
        for graph in _as_it_is_and_in_tiles(joint, setting):
            if needs_more(graph):
                continue
            try:
                return planned(graph)
            except InfeasibleBudgetError as error:
                refused = error if refused is None or error.minimum < refused.minimum else refused
        if refused is not None:
            break
    assert refused is not None
    raise refused


def _as_it_is_and_in_tiles(joint: JointGraph, setting: Setting) -> Iterator[JointGraph]:
    yield joint.copy()
    graph = summed(joint, setting)
    for tiles in tile_sequence(graph):
        yield tiled(graph, tiles, setting)


def _best_of(
    joint: JointGraph,
    names: Sequence[str],
    setting: Setting,
    pipelining: Pipelining,
    like: Structure | None,
    forwards_before_backwards: bool,
) -> LoweredPipeline:
    """The quickest of some schedules within the budget.

    Raises:
        InfeasibleBudgetError: none is.
    """
    best: tuple[float, LoweredPipeline] | None = None
    refused: InfeasibleBudgetError | None = None
    limits = _weight_limits(joint, setting) if pipelining.offloaded and like is None else [None]
    ways = [(name, limit) for name in names for limit in (limits if name == "roundpipe" else [None])]
    fits: set[str] = set()
    for name, limit in ways:
        if name in fits:
            continue
        spare = joint.copy() if len(ways) > 1 else joint
        try:
            tried = _lower_named(spare, setting, pipelining, name, like, forwards_before_backwards, limit)
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
    if best is None:
        assert refused is not None
        raise refused
    return best[1]


def _lower_named(
    joint: JointGraph,
    setting: Setting,
    pipelining: Pipelining,
    name: str,
    like: Structure | None,
    forwards_before_backwards: bool,
    weight_limit: int | None,
) -> LoweredPipeline:
    options, training = setting.options, setting.context.training
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
    known = starts_like(joint, like.starts) if like is not None else None
    cut: RoundPipePartition | tuple[int, ...]
    if name == "roundpipe":
        policies = {**SAVE_POLICIES, "full": save_slot_inputs}
        # Slots begin at stages of the user's choice only where the model is offloaded.
        own = options if pipelining.offloaded else dataclasses.replace(options, stages="auto")
        setting = setting.knowing(options=own, updates_whole=True, segment_starts=known)
        joint = setting.run(joint, PassLevel.ANNOTATED)
        cut = _rounds_of(joint, setting, pipelining, like, weight_limit)
        setting = setting.knowing(options=asked, rounds=cut)
        joint = setting.run(joint, PassLevel.SEGMENTED)
    else:
        whole = name in ("interleaved", "given")
        setting = setting.knowing(options=asked, updates_whole=whole, segment_starts=known)
        joint = setting.run(joint, PassLevel.ANNOTATED)
        if like is not None and like.segments == len(joint.segments) and not isinstance(like.cut, RoundPipePartition):
            setting = setting.knowing(stage_starts=like.cut)
        joint = setting.run(joint, PassLevel.SEGMENTED)
        cut = tuple(stage.first for stage in joint.cuts)
    joint = setting.run(joint, PassLevel.STAGED)
    structure = Structure(name, len(joint.segments), cut, segment_starts(joint))
    split = name == "zero_bubble" or (given is not None and _splits(given))
    if not training:
        only = variant_of(emit(joint, setting), setting, pipelining)
        return LoweredPipeline(
            main=only, last=only, structure=structure, given=None, devices=devices, forwards_before_backwards=False
        )
    if pipelining.checkpoint is None:
        budget = asked_budget(joint, options, setting.device)
        if budget is not None:
            full = policies["full"]
            return within_budget(
                joint, setting, split, structure, given, pipelining, forwards_before_backwards, budget, full
            )
    kinds = {"always": ("full", "full"), "never": ("none", "none"), "except_last": ("full", "none")}
    main, last = kinds[pipelining.checkpoint or "never"]
    setting = setting.knowing(options=dataclasses.replace(asked, recompute=main))

    def variant(recompute: str) -> Variant:
        lowered = emit_by_policy(joint.copy(), setting, policies[recompute], split=split, sums=True)
        return variant_of(lowered, setting, pipelining)

    first = variant(main)
    return LoweredPipeline(
        main=first,
        last=first if last == main else variant(last),
        structure=structure,
        given=given,
        devices=devices,
        forwards_before_backwards=forwards_before_backwards,
    )


def _splits(schedule: Schedule) -> bool:
    return schedule.only(ActionKind.BACKWARD_INPUT).size > 0


def _weight_limits(joint: JointGraph, setting: Setting) -> list[int | None]:
    """Bytes that an offloaded model's weights may take on a device, to be tried in turn; ``None``: as few as can be."""
    budget = asked_budget(joint, setting.options, setting.device)
    if isinstance(budget, float):
        return [None]
    if budget is None:
        budget = available_memory(setting.device)
    return [*(int(budget * share) for share in _WEIGHT_SHARES), None]


def _rounds_of(
    joint: JointGraph, setting: Setting, pipelining: Pipelining, like: Structure | None, weight_limit: int | None
) -> RoundPipePartition:
    """The segments of each slot; those of an offloaded model begin where stages are asked to."""
    training, segments = setting.context.training, joint.segments
    recompute = pipelining.checkpoint in ("always", "except_last")
    devices, microbatches = pipelining.workers, pipelining.microbatches
    if like is not None and like.segments == len(segments) and isinstance(like.cut, RoundPipePartition):
        return like.cut
    if setting.options.stages != "auto":
        runs = [(cut.first, cut.last) for cut in stages_as_asked(joint, setting.context).cuts]
        return RoundPipePartition(tuple(runs[:-1]), runs[-1], tuple(runs[-2::-1]) if training else ())
    forward = [segment.forward_seconds for segment in segments]
    backward = [segment.backward_seconds for segment in segments]
    if pipelining.offloaded:
        weights = _weights_of(joint, len(segments), setting.costs.host)
        seconds = backward if training else [0.0] * len(segments)
        return balance_offloaded_stages(forward, seconds, recompute, devices, microbatches, weights, weight_limit)
    return balance_roundpipe_stages(forward, backward, recompute, devices, microbatches)


def _weights_of(joint: JointGraph, segments: int, bandwidth: float) -> Weights:
    """What segments read of the model's tensors."""
    numbers = {node: number for number, node in enumerate(joint.primals) if node in joint.parameters}
    reads: list[set[int]] = [set() for _ in range(segments)]
    for node in joint.computed():
        reads[node.meta[Mark.SEGMENT]].update(numbers[own] for own in node.all_input_nodes if own in numbers)
    sizes = {number: tensor_bytes(tensor_values(node)) for node, number in numbers.items()}
    return Weights([frozenset(own) for own in reads], sizes, bandwidth)
