"""The way of the data: a captured joint graph through the passes to programs and their plan."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_fx.codegen import Program, emit_backward_program, emit_forward_program, emit_stage_modules
from roundpipe_fx.cost import roofline_of
from roundpipe_fx.joint_graph import JointGraph, Mark, Phase, has_side_effect, is_seeded, tensor_values
from roundpipe_fx.make_plan import make_plan
from roundpipe_fx.options import Options, StageCompiler
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.decisions import hoist_decisions
from roundpipe_fx.passes.follow_schedule import follow_schedule
from roundpipe_fx.passes.masks import expand_masks
from roundpipe_fx.passes.reinplace import reinplace
from roundpipe_fx.passes.rematerialize import keep_all, keep_stage_inputs, rematerialize
from roundpipe_fx.passes.rng import replay_rng
from roundpipe_fx.passes.segments import cut_segments
from roundpipe_fx.passes.stages import cut_stages, positions_of_names, stages_at_positions
from roundpipe_fx.passes.start_early import start_early
from roundpipe_fx.passes.streams import fork_recompute
from roundpipe_fx.plan import Plan
from roundpipe_fx.planner.choose import choose
from roundpipe_fx.planner.operations import read_operations
from roundpipe_fx.simulator import allocation_granularity, simulate_programs
from roundpipe_fx.torch_private import module_path_text

__all__ = ["Lowered", "lower"]

log = logging.getLogger(__name__)

_CHOOSERS = {"none": keep_all, "full": keep_stage_inputs}


@dataclass(frozen=True)
class Lowered:
    """A joint graph made into programs.

    Attributes:
        plan: the decisions, for people.
        forward: the program that runs the forward.
        backward: the program that runs the backward; ``None`` for an inference graph.
        stage_compiler: what the stage modules were emitted for.
    """

    plan: Plan
    forward: Program
    backward: Program | None
    stage_compiler: StageCompiler


def lower(
    joint: JointGraph,
    options: Options,
    registered_syncs: Collection[Any] = (),
    training: bool = True,
    share: float = 1.0,
) -> Lowered:
    """Run the passes and emit stage modules and programs.

    Args:
        joint: a captured graph; it is rewritten.
        options: the user's.
        registered_syncs: operators that the user declared to force a host sync.
        training: whether the graph has a backward.
        share: of the budget that may be used.

    Raises:
        InfeasibleBudgetError: the budget is below what the step needs at the least.
        ValueError: a stage name that does not exist in the model.
    """
    device = _device_of(joint)
    roofline = roofline_of(device)
    joint = expand_masks(joint)
    joint = annotate(joint, roofline)
    joint = hoist_decisions(joint, registered_syncs)
    if isinstance(options.stages, tuple):
        positions = positions_of_names(joint, options.stages, module_path_text)
        joint, segments = cut_segments(joint, positions)
        joint, cuts = stages_at_positions(joint, segments, positions)
    else:
        joint, segments = cut_segments(joint)
        joint, cuts = cut_stages(joint, segments, options.stages, roofline.transfer_seconds)
    chosen = None
    if training and options.memory_budget is not None:
        operations = read_operations(joint, len(segments), allocation_granularity(device))
        chosen = choose(operations, options.memory_budget, share)
        joint = follow_schedule(joint, chosen.candidate.schedule.backward, roofline)
    elif training:
        joint = rematerialize(joint, _CHOOSERS[options.recompute](joint), roofline)
        joint = start_early(joint)
    if training:
        joint = replay_rng(joint, roofline)
    joint.graph.eliminate_dead_code(lambda node: has_side_effect(node) or is_seeded(node))
    stage_compiler = options.stage_compiler_for(device)
    modules = emit_stage_modules(joint, reinplace if stage_compiler == "eager" else None)
    forward = emit_forward_program(joint, modules)
    backward = emit_backward_program(joint, modules) if training else None
    if backward is not None:
        fork_recompute(backward.module.graph, _recomputing(joint))
    peak = simulate_programs(forward, backward, joint.expected_tangents, allocation_granularity(device))
    plan = make_plan(joint, segments, cuts, modules, forward, backward, options.recompute, peak, chosen)
    log.info("%s", plan)
    return Lowered(plan, forward, backward, stage_compiler)


def _recomputing(joint: JointGraph) -> set[str]:
    """Names of the stage modules that repeat forward operations."""
    return {f"stage_{node.meta[Mark.STAGE]}_{Phase.RECOMPUTE}" for node in joint.computed() if Mark.ORIGIN in node.meta}


def _device_of(joint: JointGraph) -> torch.device:
    """The device that the work runs on: the first accelerator among the graph's values, else the CPU."""
    for node in joint.graph.nodes:
        for value in tensor_values(node):
            if value.device.type not in ("cpu", "meta"):
                return value.device
    return torch.device("cpu")
