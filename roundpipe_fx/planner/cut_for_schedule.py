"""Cut for a schedule: the graph of a microbatch becomes segments and stages as a schedule runs them.

::

    joint graph ── annotate ──▶ segments ──▶ stages ──▶ staged graph
                                    │
                                    ├── one that dispatches: slots, of which forward and backward have different ones
                                    └── other schedules: as many stages a device as their specification says; the
                                        user's number; on one device with replicas several, whose gradients are
                                        averaged one by one

If a graph was cut before, for a microbatch of another shape in the same step, segments and stages begin at the same
operations as in that one; where it does not have all of these operations, at the nearest, so that there are as many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from roundpipe_fx.analysis.cost import tensor_bytes
from roundpipe_fx.budget import available_memory
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, tensor_values
from roundpipe_fx.passes.entry import PassLevel
from roundpipe_fx.pipeline.same_segments import OperationKey, find_like_starts, map_boundaries, segment_starts
from roundpipe_fx.pipeline.settings import Pipelining, Structure
from roundpipe_fx.planner.stages_in_pieces import find_piece_starts
from roundpipe_fx.schedules import ScheduleSpec
from roundpipe_fx.schedules.balance_offloaded_stages import Weights, balance_offloaded_stages
from roundpipe_fx.schedules.registry import default_schedule
from roundpipe_fx.schedules.roundpipe_partition import RoundPipePartition, balance_roundpipe_stages

_WEIGHT_SHARES = (1 / 2, 1 / 4, 1 / 8)
"""Shares of the budget for an offloaded model's weights and their gradients; the rest is for computed values."""
_AVERAGED_BYTES = 1 << 24
"""Bytes of gradients that are worth a stage: what they are reduced beside takes longer than the latency."""
_GATHERED_BYTES = 1 << 22
"""The same of sharded parameters, which are gathered by stage, and of which two stages' are there at a time."""


@dataclass(frozen=True, kw_only=True)
class CutGraph:
    """A staged graph, and what is needed to emit it.

    Attributes:
        joint: the graph, after the passes on staged graphs.
        setting: what emission needs to know, the cut included.
        structure: how the graph was cut.
    """

    joint: JointGraph
    setting: Setting
    structure: Structure


def cut_for_schedule(
    joint: JointGraph,
    setting: Setting,
    pipelining: Pipelining,
    spec: ScheduleSpec,
    like: Structure | None = None,
    weight_limit: int | None = None,
    in_pieces: bool = False,
) -> CutGraph:
    """Run the passes from the joint graph to the staged graph.

    Args:
        joint: the graph of a microbatch; it is rewritten.
        setting: what lowering knows besides the graph.
        like: how the graph of another microbatch of the same step was cut.
        weight_limit: bytes that an offloaded model's weights may take on a device; ``None``: as few as possible.
        in_pieces: whether stages are in pieces (:mod:`roundpipe_fx.planner.stages_in_pieces`).

    Raises:
        ValueError: a stage name that does not exist in the model.
    """
    starts = find_like_starts(joint, like.starts) if like is not None else None
    asked = dataclasses.replace(setting.options, stages=_requested_stages(setting, pipelining, spec))
    # Without a backward slots have nothing to balance: the schedule for inference is the usual one.
    if not setting.context.training and (like is None or pipelining.offloaded):
        spec = default_schedule(pipelining.offloaded, training=False)
    averages = (
        setting.options.stages == "auto" and asked.stages == 1 and _is_averaged_by_stages(setting, pipelining, spec)
    )
    cut: RoundPipePartition | tuple[int, ...]
    if spec.dispatches:
        # Slots begin at stages of the user's choice only where the model is offloaded.
        options = setting.options if pipelining.offloaded else dataclasses.replace(setting.options, stages="auto")
        setting = setting.with_decisions(options=options, updates_whole=True, segment_starts=starts)
        joint = setting.run(joint, PassLevel.ANNOTATED)
        cut = _cut_slots(joint, setting, pipelining, like, weight_limit)
        # Slots say where stages begin; what the user asked for is passed on for the other passes.
        setting = setting.with_decisions(options=asked, roundpipe_partition=cut)
        joint = setting.run(joint, PassLevel.SEGMENTED)
    else:
        updates_whole = not spec.updates_across_stages
        setting = setting.with_decisions(options=asked, updates_whole=updates_whole, segment_starts=starts)
        joint = setting.run(joint, PassLevel.ANNOTATED)
        if averages:
            known = like.cut if like is not None and not isinstance(like.cut, RoundPipePartition) else None
            count = _count_averaged_stages(joint, pipelining.sharded) if known is None else len(known)
            setting = setting.with_decisions(options=dataclasses.replace(asked, stages=count))
        if like is not None and not isinstance(like.cut, RoundPipePartition):
            boundaries = map_boundaries(like.cut, like.starts, segment_starts(joint))
            setting = setting.with_decisions(
                stage_starts=tuple(boundaries[first] for first in like.cut) if boundaries else None
            )
        if in_pieces:
            # Each stage is divided into equally many pieces, which become stages of their own.
            setting = setting.with_decisions(
                stage_starts=find_piece_starts(setting.run(joint.copy(), PassLevel.SEGMENTED).cuts)
            )
        joint = setting.run(joint, PassLevel.SEGMENTED)
        cut = tuple(stage.first for stage in joint.cuts)
    joint = setting.run(joint, PassLevel.STAGED)
    return CutGraph(
        joint=joint, setting=setting, structure=Structure(spec, len(joint.segments), cut, segment_starts(joint))
    )


def _requested_stages(setting: Setting, pipelining: Pipelining, spec: ScheduleSpec) -> int | str | tuple[str, ...]:
    """Number of stages, or where they begin: the user's choice, or the schedule's."""
    if setting.options.stages != "auto":
        return setting.options.stages
    if spec.stages is not None and setting.context.training:
        return spec.stages
    return pipelining.workers * spec.stages_per_device


def _is_averaged_by_stages(setting: Setting, pipelining: Pipelining, spec: ScheduleSpec) -> bool:
    """Return whether a replica of one device is to have several stages.

    The gradients of each are averaged beside the backward of those before it. Sharded parameters are gathered by stage,
    and again for each microbatch: where there are several, all are gathered once instead.
    """
    replicated = setting.context.training and pipelining.over_processes and pipelining.replicas > 1
    return replicated and spec.stages is None and (not pipelining.sharded or pipelining.microbatches == 1)


def _count_averaged_stages(joint: JointGraph, sharded: bool) -> int:
    """As many as have gradients that are worth a reduction of their own, and segments."""
    size = sum(
        tensor_bytes(tensor_values(node))
        for owner, node in zip(joint.gradient_owners, joint.gradients, strict=True)
        if owner is not None and isinstance(node, fx.Node)
    )
    # As many stages as there are parts of about `_AVERAGED_BYTES` of gradients: each part is reduced while the next is
    # computed.
    return max(1, min(len(joint.segments), size // (_GATHERED_BYTES if sharded else _AVERAGED_BYTES)))


def weight_limits(setting: Setting, budget: int | float | None) -> list[int | None]:
    """Limits to try for the weights of an offloaded model.

    Args:
        setting: what lowering knows besides the graph.
        budget: bytes or a share of a device; ``None``: what it has available.

    Returns:
        Bytes on a device, in the order in which they are to be tried; ``None``: as few as possible.
    """
    if isinstance(budget, float):
        return [None]
    if budget is None:
        budget = available_memory(setting.device)
    # A half, a quarter and an eighth of the budget for weights, and at last as few bytes as possible.
    return [*(int(budget * share) for share in _WEIGHT_SHARES), None]


def _cut_slots(
    joint: JointGraph, setting: Setting, pipelining: Pipelining, like: Structure | None, weight_limit: int | None
) -> RoundPipePartition:
    """The segments of each slot; those of an offloaded model begin where the user asked stages to begin."""
    training, segments = setting.context.training, joint.segments
    recompute = pipelining.checkpoint in ("always", "except_last")
    devices, microbatches = pipelining.workers, pipelining.microbatches
    if like is not None and isinstance(like.cut, RoundPipePartition):
        # Slots of another microbatch's shape, at the same operations.
        alike = _match_slots(like.cut, like.starts, segment_starts(joint))
        if alike is not None:
            return alike
    if setting.options.stages != "auto":
        staged = setting.run(joint.copy(), PassLevel.SEGMENTED)
        runs = [(cut.first, cut.last) for cut in staged.cuts]
        # The user's stages: each is one slot forward and one backward; the last one does both at once.
        return RoundPipePartition(tuple(runs[:-1]), runs[-1], tuple(runs[-2::-1]) if training else ())
    forward = [segment.forward_seconds for segment in segments]
    backward = [segment.backward_seconds for segment in segments]
    if pipelining.offloaded:
        weights = _weights_of(joint, len(segments), pipelining.host_bandwidth(setting.costs.host))
        seconds = backward if training else [0.0] * len(segments)
        return balance_offloaded_stages(forward, seconds, recompute, devices, microbatches, weights, weight_limit)
    return balance_roundpipe_stages(forward, backward, recompute, devices, microbatches)


def _match_slots(
    cut: RoundPipePartition, theirs: Sequence[OperationKey | None], ours: Sequence[OperationKey | None]
) -> RoundPipePartition | None:
    slots = (*cut.forward, cut.fused, *cut.backward)
    boundaries = map_boundaries([first for first, _ in slots], theirs, ours)
    if boundaries is None:
        return None
    # A slot ends where the next one begins, also where its operations have other numbers in this graph.
    runs = [(boundaries[first], boundaries[last + 1] - 1) for first, last in slots]
    forward = len(cut.forward)
    return RoundPipePartition(tuple(runs[:forward]), runs[forward], tuple(runs[forward + 1 :]))


def _weights_of(joint: JointGraph, segments: int, bandwidth: float) -> Weights:
    """The parameters and buffers that each segment reads, and their bytes."""
    numbers = {node: number for number, node in enumerate(joint.primals) if node in joint.parameters}
    reads: list[set[int]] = [set() for _ in range(segments)]
    for node in joint.computed():
        reads[node.meta[Mark.SEGMENT]].update(numbers[source] for source in node.all_input_nodes if source in numbers)
    sizes = {number: tensor_bytes(tensor_values(node)) for node, number in numbers.items()}
    return Weights([frozenset(numbers) for numbers in reads], sizes, bandwidth)
