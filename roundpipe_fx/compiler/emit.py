"""Emission: what was decided is written into the graph, and stage modules and programs are emitted from it.

::

    graph with stages, decisions
        │ passes of planned graphs        recomputation, sums, early operations: every decision is in the graph
        ▼
    planned graph ── emit_stage_modules ──▶ a module for each stage and phase, with passes of stage modules on each
        │                                   emit_forward_program, emit_backward_program ──▶ the order of calls
        │ offload candidates              values that outlive calls: only programs have an order of calls
        ▼
    programs, with passes of programs: copies to the host, recomputation on a second stream
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from torch import fx

from roundpipe_fx.analysis.cost.launches import seconds_with_launches
from roundpipe_fx.analysis.cost.roofline import Roofline, find_roofline
from roundpipe_fx.analysis.simulator import allocation_granularity
from roundpipe_fx.codegen import (
    KnownModules,
    Program,
    emit_backward_program,
    emit_forward_program,
    emit_stage_modules,
)
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.overlap import UnfilledFractions, modules_to_overlap
from roundpipe_fx.compiler.plan_cache import CachedReport
from roundpipe_fx.compiler.run_passes import run_passes
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.compiler.values_on_host import (
    find_offload_candidates,
    is_host_requested,
    schedule_hidden_copies,
    schedule_requested_copies,
)
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, tensor_values
from roundpipe_fx.passes.entry import PassLevel
from roundpipe_fx.remat.choose import Chosen
from roundpipe_fx.remat.save_policy import SavePolicy, recompute_unsaved
from roundpipe_fx.torch_private import assumed_sizes, input_sizes, size_hint


def emit_by_policy(
    joint: JointGraph,
    setting: Setting,
    policy: SavePolicy,
    *,
    split: bool = False,
    sums: bool = False,
    known: KnownModules | None = None,
) -> Lowered:
    """Emit what a save policy asks for, with what starts early at no cost in memory.

    Args:
        joint: a training graph with stages; it is rewritten.
        setting: what else there is to know.
        policy: says what is saved.
    """
    schedule = recompute_unsaved(joint, policy(joint))
    return emit(joint, setting.with_decisions(schedule=schedule, early=True), split=split, sums=sums, known=known)


def emit(
    joint: JointGraph,
    setting: Setting,
    *,
    chosen: Chosen | CachedReport | None = None,
    split: bool = False,
    sums: bool = False,
    known: KnownModules | None = None,
) -> Lowered:
    """Write what was decided into a graph, and emit stage modules and programs.

    Args:
        joint: a graph with stages; it is rewritten.
        setting: what else there is to know; what is recomputed is in its context.
        chosen: the plan, where one was chosen.
        split: whether gradients of parameters are made in modules of their own.
        sums: whether stage modules add gradients to those of earlier microbatches.
        known: see :func:`roundpipe_fx.codegen.emit_stage_modules`; for plans that are only simulated.
    """
    training = setting.context.training
    setting = setting.with_decisions(split=split, sums=sums)
    joint = setting.run(joint, PassLevel.PLANNED)
    operations: dict[tuple[int, Phase], list[fx.Node]] = {}
    unfilled = UnfilledFractions(find_saturating_size(setting))
    recompute_seconds = 0.0
    # Seconds by stage and phase; nodes with an origin are recomputations.
    for node in joint.computed():
        key = node.meta[Mark.STAGE], node.meta[Mark.PHASE]
        operations.setdefault(key, []).append(node)
        unfilled.add(key, node)
        recompute_seconds += node.meta[Mark.SECONDS] if Mark.ORIGIN in node.meta else 0.0
    eager = setting.compiler == "eager"
    seconds = {key: seconds_with_launches(nodes, setting.costs, eager) for key, nodes in operations.items()}

    def rewrite(graph: fx.Graph) -> fx.Graph:
        return run_passes(graph, setting.passes, PassLevel.STAGE_MODULE, setting.context)

    modules = emit_stage_modules(joint, rewrite, known)
    forward = emit_forward_program(joint, modules)
    backward = emit_backward_program(joint, modules) if training else None
    tangents = joint.expected_tangents
    # Copies to the host are decided on the emitted programs, since only these have an order of calls.
    if backward is not None:
        if setting.context.runs_programs and (setting.sent or is_host_requested(joint, setting.device.type)):
            granularity = allocation_granularity(setting.device)
            values = find_offload_candidates(joint, forward, backward, tangents, device_of(joint).type, granularity)
            if setting.sent:
                byte_seconds = 1 / setting.costs.host
                copies = schedule_hidden_copies(
                    values, forward, backward, seconds, byte_seconds, setting.sent, setting.host_limit
                )
            else:
                copies = schedule_requested_copies(values, forward, backward)
            setting = setting.with_decisions(host_copies=copies)
        offloaded = {copy.value for copy in setting.context.host_copies}
        # The copy back of a value is waited for on the main stream alone.
        reading = {call.name for call in backward.calls if any(node.name in offloaded for node in call.inputs)}
        overlapped = modules_to_overlap(joint, backward, unfilled) - reading
        _rewrite_program(backward, setting, overlapped)
    _rewrite_program(forward, setting)
    symbolic_inputs, assumed = input_sizes(joint.module), assumed_sizes(joint.module)
    symbols = {size.symbol for size in symbolic_inputs}
    return Lowered(
        joint=joint,
        setting=setting,
        chosen=chosen,
        modules=modules,
        forward=forward,
        backward=backward,
        seconds=seconds,
        recompute_seconds=recompute_seconds,
        tangents=tangents,
        sizes={
            f"{joint.label(size.node)}, dimension {size.dim}": size_hint(size.size)
            for size in symbolic_inputs
            if size.symbol in assumed
        },
        assumed={symbol: size for symbol, size in assumed.items() if symbol not in symbols},
    )


def _rewrite_program(program: Program, setting: Setting, overlapped: Collection[str] = ()) -> None:
    context = dataclasses.replace(setting.context, program=program.name, overlapped=overlapped)
    run_passes(program.module.graph, setting.passes, PassLevel.PROGRAM, context)


def find_saturating_size(setting: Setting) -> int:
    """Elements of a result from which on a kernel fills the device."""
    return roofline_for(setting).full


def roofline_for(setting: Setting) -> Roofline:
    """The roofline of the device to compile for."""
    return find_roofline(setting.device, setting.options.device_name)


def device_of(joint: JointGraph) -> torch.device:
    """The device that the work runs on: the first accelerator among the graph's values, else the CPU."""
    for node in joint.graph.nodes:
        for value in tensor_values(node):
            if value.device.type not in ("cpu", "meta"):
                return value.device
    return torch.device("cpu")
