"""Lowering on one device: a captured joint graph through passes, planner and emission to programs and their plan.

Within a budget these steps follow each other until there is a plan. An output that the caller drops takes no memory in
the backward, and one that the caller does not read is not computed; the step may prove either assumption wrong::

    passes that rewrite the graph
    a plan from the cache                    its marks and its schedule are written into the graph, without a search
    passes that only mark nodes
    a search, or a sequence of rotor's       nothing more is tried for a sequence
    a search for the refusal's least bytes   if the budget was a fraction
    a search with ``droppable`` outputs      dropped before the backward; left out where only the next may do
    a search with ``may_be_unread`` outputs  dropped without being read
    a refusal                                with the least bytes of the last search

Without a budget nothing is searched for: a save policy decides, or there is no backward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from roundpipe_fx.analysis.allocator_histories import read_current_histories
from roundpipe_fx.analysis.cost import COMPILED_STAGES, MeasuredCosts, cost_model
from roundpipe_fx.analysis.cost.network import Network
from roundpipe_fx.analysis.cost.probe import write_probes
from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.analysis.outside_loss import output_bytes
from roundpipe_fx.analysis.step_of_calls import StepNeeds
from roundpipe_fx.budget import Found, Infeasible, Result, default_budget
from roundpipe_fx.compiler.cached_marks import FIRST_MARKING_PASS, mark_as_cached, marks_as_data, remove_marks
from roundpipe_fx.compiler.emit import device_of, emit, emit_by_policy
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.operations_in_tiles import cut_graph, read_graph_operations, with_fewest_stages
from roundpipe_fx.compiler.plan_cache import CachedPlan, CachedReport, PlanFile, plan_file
from roundpipe_fx.compiler.run_passes import edit_passes, make_dump_folder
from roundpipe_fx.compiler.schedule_data import schedule_as_data, schedule_from_data
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.compiler.values_on_host import is_host_requested
from roundpipe_fx.ir.alternative_plans import PlansInTiles
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase
from roundpipe_fx.ir.options import Options
from roundpipe_fx.ir.recompute_marks import read_region_budget
from roundpipe_fx.passes.entry import Pass, PassContext, PassLevel
from roundpipe_fx.planner.judged_by_code import can_read_code, judge_by_code, search_by_code
from roundpipe_fx.planner.program_within_budget import PROGRAMS, plan_by_rotor
from roundpipe_fx.planner.search import search
from roundpipe_fx.planner.tiled_frontier import make_tiled_frontier
from roundpipe_fx.planner.with_host import find_host_budget
from roundpipe_fx.remat.choose import Chosen
from roundpipe_fx.remat.save_policy import SavePolicy, save_all, save_stage_inputs
from roundpipe_fx.runtime.library_memory import expected_library_bytes
from roundpipe_fx.torch_private import input_sizes

SAVE_POLICIES: Mapping[str, SavePolicy] = {"none": save_all, "full": save_stage_inputs}


def lower(
    joint: JointGraph,
    options: Options,
    registered_syncs: Collection[Any] = (),
    training: bool = True,
    share: float = 1.0,
    workspaces: Mapping[str, int] | None = None,
    step: StepNeeds | None = None,
    droppable: frozenset[int] = frozenset(),
    unread: frozenset[int] = frozenset(),
    may_be_unread: frozenset[int] = frozenset(),
) -> Result[Lowered]:
    """Run the passes and emit stage modules and programs.

    Args:
        joint: a captured graph; it is rewritten.
        registered_syncs: operators that the user declared to force a host sync.
        training: whether the graph has a backward.
        share: of the budget that may be used.
        workspaces: what operators whose needs depend on data, and compiled stages, have been seen to allocate for
            themselves, by name.
        step: what else the step holds, where it makes several calls.
        droppable: numbers of outputs that may be assumed to be dropped by the caller before the backward begins, where
            the budget cannot be met otherwise.
        unread: numbers of outputs that are assumed to be dropped without having been read.
        may_be_unread: numbers of outputs that may be assumed so, where the budget cannot be met otherwise.

    Raises:
        ValueError: a stage name that does not exist in the model.
    """
    setting = _gather_setting(joint, options, registered_syncs, workspaces, training, step=step)
    beyond = (workspaces or {}).get(COMPILED_STAGES, 0) if setting.compiler != "eager" else 0
    setting = dataclasses.replace(
        setting.with_decisions(runs_programs=True, unread=unread), share=share, beyond_plan=beyond
    )
    file = _plan_file(joint, setting, (droppable, unread, may_be_unread))
    # A plan of an earlier process, for the same graph, options and versions.
    cached = file.read() if file is not None else None
    marking = _find_first_marking(setting.passes)
    joint = setting.run(joint, PassLevel.JOINT, stop=marking)
    if file is not None and cached is not None:
        try:
            return Found(_emit_cached(joint, setting, cached))
        except (ValueError, TypeError, KeyError) as error:
            file.ignore(error)
            remove_marks(joint)
    # Names before marking passes have run: the file stores which nodes they have marked.
    unmarked = [node.name for node in joint.computed()]
    joint = setting.run(joint, PassLevel.JOINT, start=marking)
    joint, unmarked = _leave_out_unread(joint, setting, unmarked)
    asked = budget = requested_budget(joint, options, setting.device) if training else None
    # A step of several calls: this one has what the others leave.
    if step is not None and step.limit is not None:
        budget = step.limit
        setting = dataclasses.replace(setting, share=1.0)
    if budget is not None:
        result = (
            plan_by_rotor(joint, setting) if options.rotor is not None else _search_programs(joint, budget, setting)
        )
        if isinstance(result, Infeasible) and isinstance(asked, float):
            # The limit is a share of what graphs needed when they were planned alone, before a step had shown all.
            result = _search_programs(joint, result.minimum, setting)
        # Without a plan the caller is assumed to drop outputs before the backward, which a step may prove wrong.
        if isinstance(result, Infeasible) and droppable - joint.dropped and options.rotor is None:
            freed = output_bytes(joint, droppable - joint.dropped)
            joint = dataclasses.replace(joint, dropped=joint.dropped | droppable)
            # A plan with outputs dropped has hardly fewer bytes than one without, less these outputs. Where that cannot
            # be enough, the search below finds the plan or the refusal: it assumes that they are dropped, and more.
            hopeless = isinstance(budget, int) and result.minimum - freed > budget
            if not hopeless or not may_be_unread - unread:
                result = _search_programs(joint, budget, setting)
        if isinstance(result, Infeasible) and may_be_unread - unread and options.rotor is None:
            setting = setting.with_decisions(unread=unread | may_be_unread)
            joint = dataclasses.replace(joint, dropped=joint.dropped | may_be_unread)
            joint, unmarked = _leave_out_unread(joint, setting, unmarked)
            result = _search_programs(joint, budget, setting)
        if isinstance(result, Infeasible):
            return result
        lowered = result.value
        # Tiled plans are not kept: loops are not nodes that a file could name.
        if file is not None and not lowered.is_tiled:
            names = [item.name for item in setting.passes[marking:]]
            marks = marks_as_data(joint, unmarked, names, lowered.joint.segments, lowered.joint.cuts)
            if marks is not None:
                file.write(_make_cached_plan(lowered, marks))
    else:
        # Copies to the host that the user asks for begin and end between stages.
        if options.recompute != "full" and not is_host_requested(joint, setting.device.type):
            setting = with_fewest_stages(setting)
        joint = setting.run(cut_graph(joint, setting), PassLevel.STAGED)
        lowered = (
            emit_by_policy(joint, setting, SAVE_POLICIES[options.recompute or "none"])
            if training
            else emit(joint, setting)
        )
        if can_read_code(setting):
            lowered = judge_by_code(lowered)
    if isinstance(setting.costs, MeasuredCosts):
        setting.costs.save()
    write_probes(setting.device)
    return Found(lowered)


def _leave_out_unread(joint: JointGraph, setting: Setting, names: list[str]) -> tuple[JointGraph, list[str]]:
    """Leave out unread outputs of a graph, and drop the nodes that only they need from the list of names."""
    before = {node.name for node in joint.computed()}
    joint = setting.run(joint, PassLevel.OUTPUTS)
    erased = before - {node.name for node in joint.computed()}
    return joint, [name for name in names if name not in erased]


def _search_programs(joint: JointGraph, budget: int | float, setting: Setting) -> Result[Lowered]:
    """The programs of the quickest plan, or what the user is told."""
    setting = _with_lazy_tiled_frontier(joint, setting)
    if can_read_code(setting) and not is_host_requested(joint, setting.device.type):
        result = search_by_code(joint, budget, setting)
    else:
        result = search(joint, budget, setting, PROGRAMS)
    if isinstance(result, Found):
        return Found(result.value.emitted)
    wants_sizes = setting.options.tiling != "never" and bool(input_sizes(joint.module))
    return Infeasible(minimum=result.minimum, bottleneck=result.bottleneck.text, wants_sizes=wants_sizes)


def run_common_passes(
    joint: JointGraph,
    options: Options,
    registered_syncs: Collection[Any],
    workspaces: Mapping[str, int] | None = None,
    training: bool = True,
    microbatches: int = 1,
    step: StepNeeds | None = None,
    network: Network | None = None,
) -> tuple[JointGraph, Setting]:
    """Run the passes up to where the graph is cut: what every way of cutting it has in common.

    Arguments as for :func:`_gather_setting`.
    """
    setting = _gather_setting(joint, options, registered_syncs, workspaces, training, microbatches, step, network)
    return setting.run(joint, PassLevel.JOINT), setting


def _gather_setting(
    joint: JointGraph,
    options: Options,
    registered_syncs: Collection[Any],
    workspaces: Mapping[str, int] | None = None,
    training: bool = True,
    microbatches: int = 1,
    step: StepNeeds | None = None,
    network: Network | None = None,
) -> Setting:
    """Gather the facts that lowering knows beside a captured graph.

    Args:
        joint: a captured graph; it is rewritten.
        registered_syncs: operators that the user declared to force a host sync.
        workspaces: what operators and compiled stages have been seen to allocate for themselves, by name.
        training: whether the graph has a backward.
        microbatches: into how many a batch is split.
        step: what else the step holds, where it makes several calls.
        network: the links between all ranks, for which one plan is made; ``None``: each process plans for itself.
    """
    device = options.device or device_of(joint)
    may_recompute = options.recompute == "full" or requested_budget(joint, options, device) is not None
    context = PassContext(
        options=options,
        device=device,
        compiler=options.stage_compiler_for(device),
        costs=cost_model(options.cost, device, options.device_name, network),
        training=training,
        registered_syncs=registered_syncs,
        workspaces=workspaces,
        microbatches=microbatches,
        recomputes=training and options.rotor is None and may_recompute,
        one_plan=network is not None,
        dump=make_dump_folder(joint),
    )
    # Of the device itself, and for this process alone: other plans are the same wherever they are made.
    is_own = options.device_name is None and network is None and microbatches == 1
    histories = read_current_histories(device) if is_own else ()
    return Setting(passes=edit_passes(options.passes), context=context, step=step, histories=histories)


def _find_first_marking(passes: Sequence[Pass]) -> int:
    """Position of the first pass that only marks nodes."""
    return next((position for position, item in enumerate(passes) if item.name == FIRST_MARKING_PASS), len(passes))


def is_bounded_in_bytes(joint: JointGraph, options: Options) -> bool:
    """Return whether the budget of a training graph is bytes, whatever its sizes."""
    if isinstance(options.memory_budget, int) or options.rotor is not None:
        return True
    device = options.device or device_of(joint)
    by_default = options.memory_budget is None and options.recompute is None and options.device_name is None
    return by_default and device.type == "cuda"


def requested_budget(joint: JointGraph, options: Options, device: torch.device) -> int | float | None:
    """The budget to plan for; ``None``: as the option ``recompute`` says."""
    if options.rotor is not None:
        return options.rotor.limit
    if options.memory_budget is not None:
        return options.memory_budget
    if options.recompute is None and options.device_name is None and device.type == "cuda":
        return default_budget(device, expected_library_bytes(device))
    # No budget: yet parts of the model may have one of their own, or must be recomputed.
    forward = joint.in_phase(Phase.FORWARD)
    if any(read_region_budget(node) is not None for node in forward):
        return 1.0
    if options.recompute != "full" and any(Mark.MUST_RECOMPUTE in node.meta for node in forward):
        return 1.0  # regions are recomputed just in time, which is the planner's work
    return None


def _with_lazy_tiled_frontier(joint: JointGraph, setting: Setting) -> Setting:
    """Return the graph with a frontier of tiled plans that is computed on first use."""
    options = setting.options
    if options.tiling == "never" or options.rotor is not None:
        return setting

    def read_in_tiles(dropped: frozenset[int]) -> PlansInTiles:
        return make_tiled_frontier(dataclasses.replace(joint, dropped=dropped), setting)

    return dataclasses.replace(setting, read_in_tiles=read_in_tiles)


def _plan_file(joint: JointGraph, setting: Setting, outputs: Sequence[frozenset[int]]) -> PlanFile | None:
    """File in which the plan of a captured graph is cached; ``None`` if it is planned each time.

    Args:
        setting: what else there is to know.
        outputs: what is assumed of them, see :func:`lower`. A plan that assumes outputs to be dropped is not one for
            callers that hold them.
    """
    options, context = setting.options, setting.context
    # Whoever changes passes or follows a sequence decides what no file can describe.
    budget = requested_budget(joint, options, setting.device)
    customized = options.passes is not None or options.rotor is not None or callable(setting.compiler)
    if budget is None or customized or not context.training or setting.step is not None or options.cost != "roofline":
        return None
    return plan_file(
        joint,
        device=setting.device,
        costs=setting.costs,
        options=(options, budget, setting.share, setting.compiler, [*map(sorted, outputs)]),
        registered_syncs=context.registered_syncs,
        workspaces=context.workspaces or {},
    )


def _make_cached_plan(lowered: Lowered, marks: Any) -> CachedPlan:
    chosen, schedule = lowered.chosen, lowered.setting.context.schedule
    assert isinstance(chosen, Chosen) and schedule is not None
    return CachedPlan(
        limit=chosen.limit,
        peak=lowered.lasting_peak,
        frontier=chosen.frontier,
        sent=lowered.setting.sent,
        host_limit=lowered.setting.host_limit,
        shared=chosen.followed is not chosen.graph,
        dropped=tuple(sorted(lowered.joint.dropped)),
        unread=tuple(sorted(lowered.joint.unread)),
        schedule=schedule_as_data(schedule),
        marks=marks,
    )


def _emit_cached(joint: JointGraph, setting: Setting, cached: CachedPlan) -> Lowered:
    """Emit a cached plan.

    Args:
        joint: a graph before the first pass that only marks nodes; it is marked.
        setting: what else there is to know.

    Raises:
        ValueError: it does not fit the graph, or what is emitted does not peak where it should.
        TypeError: it is no plan.
        KeyError: it is no plan.
    """
    if cached.unread:
        setting = setting.with_decisions(unread=frozenset(cached.unread))
        joint = setting.run(joint.copy(), PassLevel.OUTPUTS)
        if sorted(joint.unread) != [*cached.unread]:
            raise ValueError(f"of its unread outputs, {[*cached.unread]}, only {sorted(joint.unread)} can be left out")
    joint = dataclasses.replace(mark_as_cached(joint, cached.marks), dropped=frozenset(cached.dropped))
    # Copies are made as in planning: nodes that passes add to them are named by what else has been there. The schedule
    # refers to nodes by these names.
    whole = (
        setting.with_decisions(everything_saved=True).run(joint.copy(), PassLevel.STAGED) if cached.shared else joint
    )
    copy = whole.copy()
    schedule = schedule_from_data(cached.schedule, copy)

    @functools.cache
    def operations() -> OperationGraph:
        return read_graph_operations(setting.run(joint, PassLevel.STAGED), setting)

    recalled = CachedReport(cached.limit, cached.frontier, operations)
    host_limit = min(
        cached.host_limit,
        find_host_budget(setting.options.host_budget, on_paper=setting.options.device_name is not None),
    )
    looking = dataclasses.replace(_with_lazy_tiled_frontier(joint, setting), sent=cached.sent, host_limit=host_limit)
    lowered = emit(copy, looking.with_decisions(schedule=schedule), chosen=recalled)
    if can_read_code(setting):
        lowered = judge_by_code(lowered)
    # The file is of another allocator's or library's state: it is planned anew.
    if lowered.lasting_peak != cached.peak:
        raise ValueError(f"its programs peak at {lowered.lasting_peak} bytes, not {cached.peak}")
    if lowered.peak.bytes > cached.limit:
        raise ValueError(f"with the blocks that the allocator has now, its programs peak at {lowered.peak.bytes} bytes")
    return lowered
