"""The plan as a report, read off a finished graph.

Each operation of a stage is counted once. Its marks say to which seconds and to which list of the plan it belongs::

    phase        origin   seconds of     its value is listed as
    FORWARD      no       forward        saved or hoisted if the backward reads it, passing otherwise
    BACKWARD     no       backward
    RECOMPUTE    yes      recomputation  recomputed (and replayed, if it draws random numbers); "early"
    BACKWARD     yes      recomputation  recomputed (and replayed), just before it is used
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import fx

from roundpipe_fx.analysis.allocator_histories import find_histories
from roundpipe_fx.analysis.caching_allocator import CachingAllocator, History
from roundpipe_fx.analysis.cost import COMPILED_STAGES, depends_on_data, learned_name, seconds_with_launches
from roundpipe_fx.analysis.memory_timeline import memory_timeline
from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.analysis.outside_loss import output_bytes
from roundpipe_fx.analysis.program_events import Follow
from roundpipe_fx.analysis.simulator import find_course_peak, find_worst_history
from roundpipe_fx.codegen import Program, StageModule, own_nodes
from roundpipe_fx.compiler.lowered import Lowered, find_trained_inputs, follow_programs
from roundpipe_fx.compiler.planned_values import (
    ValueCosts,
    hoist_reason,
    list_allocating,
    planned_tiles,
    planned_values,
)
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.alternative_plans import PlansInTiles
from roundpipe_fx.ir.decisions import PlannedStage
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, is_tensor, module_path, saved_values, viewed
from roundpipe_fx.ir.segment import StageCut
from roundpipe_fx.pipeline.host_memory import ASSUMED_HOST_BYTES
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.report.plan_details import EmittedStep, emitted_lines
from roundpipe_fx.report.plan_options import options_as_text
from roundpipe_fx.torch_private import module_path_text


def plan_of(lowered: Lowered) -> Plan:
    """Read the plan off a graph that was lowered.

    Args:
        lowered: the graph and its programs.
    """
    joint, setting, chosen, backward = lowered.joint, lowered.setting, lowered.chosen, lowered.backward
    saved = [node for node in saved_values(joint) if node.op != "placeholder"] if backward is not None else []
    segments, modules = joint.segments, lowered.modules
    options = setting.options
    plan = Plan(
        stages=_describe_stages(joint, joint.cuts, modules, saved, setting),
        segments=(len(segments), len({segment.fingerprint for segment in segments})),
        recompute=setting.options.recompute or "none",
        budget=lowered.budget,
        peak=lowered.peak,
        trade_off=chosen.frontier if chosen is not None else (),
        assumed=_list_assumptions(lowered),
        sizes=lowered.sizes,
        training=backward is not None,
        rates=setting.costs.rates,
        modules=tuple(modules.values()),
        on_host=tuple(copy.value for copy in setting.context.host_copies),
        programs=(lowered.forward,) if backward is None else (lowered.forward, backward),
        read_operations=chosen.read_operations if chosen is not None else None,
        read_step=_make_reader(lowered),
        read_in_tiles=_make_tiles_reader(lowered),
        tiles=planned_tiles(joint),
        dropped_bytes=output_bytes(joint, joint.dropped),
        unread_bytes=output_bytes(joint, joint.unread),
        options=options_as_text(setting),
        assumed_host_bytes=ASSUMED_HOST_BYTES if options.device_name is not None and options.host_budget is None else 0,
    )
    if not plan.on_host:
        return plan
    return dataclasses.replace(plan, host_link_share=host_link_share(plan, plan.host_bytes, setting.costs.host))


def host_link_share(plan: Plan, sent: int, bandwidth: float) -> float:
    """The share of the forward, or of the backward if that is shorter, in which the link to the host carries values.

    Args:
        plan: its stages' seconds are those of a microbatch.
        sent: bytes that leave, for each microbatch.
        bandwidth: bytes a second, in each direction.
    """
    forward = sum(stage.forward_seconds for stage in plan.stages)
    backward = sum(stage.backward_seconds + stage.recompute_seconds for stage in plan.stages)
    return sent / bandwidth / min(forward, backward) if sent else 0.0


def with_dropped_outputs(plan: Plan, lowered: Lowered) -> Plan:
    """Correct a plan for what the caller does with the outputs.

    Args:
        plan: of the same programs.
        lowered: the programs, and the outputs that the caller drops.
    """
    dropped = output_bytes(lowered.joint, lowered.joint.dropped)
    plan = dataclasses.replace(plan, peak=lowered.peak, dropped_bytes=dropped, read_step=_make_reader(lowered))
    if plan.read_operations is None:
        return plan
    # Other plans were looked at as if the outputs were held; they are looked for again when somebody asks.
    names = frozenset(viewed(lowered.joint.outputs[position]).name for position in lowered.joint.dropped)
    return dataclasses.replace(
        plan,
        trade_off=((plan.peak_bytes, plan.recompute_seconds),),
        read_operations=functools.partial(_read_operations_dropping, plan.read_operations, names),
        read_in_tiles=_make_tiles_reader(lowered),
    )


def _read_operations_dropping(read_operations: Callable[[], OperationGraph], names: Collection[str]) -> OperationGraph:
    """Read the operations of a graph for a caller that drops outputs, by name, when the forward is over."""
    operations = read_operations()
    dropped = {storage for storage in operations.outputs if operations.values[storage].name in names}
    outputs, released = operations.outputs - dropped, operations.released | dropped
    return dataclasses.replace(operations, outputs=outputs, released=released)


def _make_tiles_reader(lowered: Lowered) -> Callable[[], PlansInTiles] | None:
    read = lowered.setting.read_in_tiles
    return None if read is None else functools.partial(read, lowered.joint.dropped)


def _make_reader(lowered: Lowered) -> Callable[[], EmittedStep]:
    """Reads the step off its programs. It holds what is needed for that, and not the planner's result."""
    setting = lowered.setting
    return functools.partial(
        _read_emitted_step,
        lowered.joint,
        lowered.modules,
        lowered.forward,
        lowered.backward,
        lowered.tangents,
        setting.device,
        setting.histories,
        lowered.follow,
    )


def _read_emitted_step(
    joint: JointGraph,
    modules: Mapping[tuple[int, Phase], StageModule],
    forward: Program,
    backward: Program | None,
    tangents: Collection[fx.Node],
    device: torch.device,
    now: Sequence[History],
    follow: Follow | None,
) -> EmittedStep:
    """Read the step off its programs, which is done when somebody looks at the plan."""
    nodes = own_nodes(joint, modules)
    course = follow_programs(joint, forward, backward, tangents, device, follow)
    histories = *find_histories(device, find_course_peak(course).bytes), *now
    memory = memory_timeline(course, nodes)
    if histories:
        trained = find_trained_inputs(joint)
        worst = find_worst_history(course, histories, trained)
        memory = memory_timeline(course, nodes, CachingAllocator(), trained, worst)
    return EmittedStep(memory=memory, lines=emitted_lines(modules.values(), nodes))


def _describe_stages(
    joint: JointGraph,
    cuts: Sequence[StageCut],
    modules: Mapping[tuple[int, Phase], StageModule],
    saved: Sequence[fx.Node],
    setting: Setting,
) -> tuple[PlannedStage, ...]:
    """Describe the stages in the order of ``cuts``."""
    by_stage: dict[int, list[fx.Node]] = {cut.index: [] for cut in cuts}
    for node in joint.computed():
        by_stage[node.meta[Mark.STAGE]].append(node)
    saved_by_stage: dict[int, list[fx.Node]] = {cut.index: [] for cut in cuts}
    for node in saved:
        saved_by_stage[node.meta[Mark.STAGE]].append(node)
    costs = ValueCosts(joint, saved)
    same_as = _find_equal_stages(cuts, modules)

    def planned(cut: StageCut) -> PlannedStage:
        index, entry_bytes = cut.index, joint.segments[cut.first].entry_bytes
        return _describe_stage(cut, by_stage[index], saved_by_stage[index], costs, entry_bytes, same_as[index], setting)

    return tuple(map(planned, cuts))


def _describe_stage(
    cut: StageCut,
    nodes: Sequence[fx.Node],
    saved: Sequence[fx.Node],
    costs: ValueCosts,
    entry_bytes: int,
    same_as: int | None,
    setting: Setting,
) -> PlannedStage:
    """Describe one stage for the plan.

    Args:
        saved: those of its values that are saved.
        costs: of the graph's values.
        entry_bytes: bytes that enter the stage.
        same_as: an earlier stage with the same modules.
        setting: what emission knew besides the graph.
    """
    together = functools.partial(seconds_with_launches, costs=setting.costs, eager=setting.compiler == "eager")
    forward = [node for node in nodes if node.meta[Mark.PHASE] is Phase.FORWARD]
    recomputed = [node for node in nodes if Mark.ORIGIN in node.meta]
    replayed = [node for node in recomputed if Mark.REPLAYED in node.meta]
    backward = [node for node in nodes if node.meta[Mark.PHASE] is not Phase.FORWARD and Mark.ORIGIN not in node.meta]
    return PlannedStage(
        index=cut.index,
        modules=_modules_text(nodes),
        segments=(cut.first, cut.last),
        forward_seconds=together(forward),
        recompute_seconds=_seconds(recomputed),
        backward_seconds=together(backward),
        early_seconds=_seconds(node for node in nodes if node.meta[Mark.PHASE] is Phase.RECOMPUTE),
        entry_bytes=entry_bytes,
        saved=planned_values(costs, (node for node in saved if not hoist_reason(node))),
        hoisted=planned_values(costs, (node for node in saved if hoist_reason(node))),
        recomputed=planned_values(costs, (node for node in list_allocating(recomputed) if is_tensor(node))),
        replayed=planned_values(costs, replayed),
        passing=planned_values(costs, (node for node in nodes if costs.is_passing(node))),
        same_as=same_as,
    )


def _find_equal_stages(
    cuts: Sequence[StageCut], modules: Mapping[tuple[int, Phase], StageModule]
) -> dict[int, int | None]:
    """For each stage the first one with the same modules; ``None`` for the first one itself."""
    first: dict[tuple[str, ...], int] = {}
    equal: dict[int, int | None] = {}
    for cut in cuts:
        digests = tuple(modules[cut.index, phase].fingerprint for phase in Phase if (cut.index, phase) in modules)
        same = first.setdefault(digests, cut.index)
        equal[cut.index] = None if same == cut.index else same
    return equal


def _seconds(nodes: Iterable[fx.Node]) -> float:
    return sum(node.meta[Mark.SECONDS] for node in nodes)


def _list_assumptions(lowered: Lowered) -> dict[str, int]:
    """Assumptions that a step may refute: sizes that depend on data, workspaces in bytes, calls alive at once."""
    beyond_plan, step = lowered.setting.beyond_plan, lowered.setting.step
    alive = step.alive if step is not None else 1
    workspaces = {
        f"workspace of {learned_name(node)}": node.meta[Mark.WORKSPACE]
        for node in lowered.joint.computed()
        if Mark.WORKSPACE in node.meta and depends_on_data(node)
    }
    compiled = {f"workspace of {COMPILED_STAGES}": beyond_plan} if beyond_plan else {}
    calls = {"calls alive at once": alive} if alive > 1 else {}
    return {**lowered.assumed, **workspaces, **compiled, **calls}


def _modules_text(nodes: Sequence[fx.Node]) -> str:
    forward = [node for node in nodes if node.meta[Mark.PHASE] is Phase.FORWARD]
    paths = [module_path(node, module_path_text) for node in forward or nodes]
    paths = [path for path in paths if path] or [""]
    if paths[0] == paths[-1]:
        return paths[0] or "model"
    return f"{paths[0]} … {paths[-1]}"
