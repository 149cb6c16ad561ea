"""The way of the data: a captured joint graph through the passes to programs and their plan."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import COMPILED_STAGES, MeasuredCosts, cost_model
from roundpipe_fx.analysis.cost.network import Network
from roundpipe_fx.analysis.cost.roofline import Roofline, roofline_of
from roundpipe_fx.analysis.cost.trial import write_trials
from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.analysis.simulator import allocation_granularity
from roundpipe_fx.analysis.step_of_calls import StepNeeds
from roundpipe_fx.budget import default_budget
from roundpipe_fx.codegen import (
    KnownModules,
    Program,
    emit_backward_program,
    emit_forward_program,
    emit_stage_modules,
)
from roundpipe_fx.compiler.cached_marks import FIRST_MARKING_PASS, mark_as_cached, marks_as_data, remove_marks
from roundpipe_fx.compiler.class_tiles import class_regions
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.operations import (
    cut,
    operations_of,
    summed,
    tiled,
    with_gradients,
    without_common_subexpressions,
)
from roundpipe_fx.compiler.overlap import Unfilled, modules_to_overlap, stages_to_overlap
from roundpipe_fx.compiler.plan_cache import CachedPlan, PlanFile, Recalled, plan_file
from roundpipe_fx.compiler.run_passes import dump_folder, edited_passes, run_passes
from roundpipe_fx.compiler.schedule_data import schedule_as_data, schedule_from_data
from roundpipe_fx.compiler.segments_in_tiles import tilings_by_segment
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.compiler.tiled_frontier import plans_in_tiles
from roundpipe_fx.compiler.tiling import Needs, TilingSteps, UnmetError, plan_with_tiles
from roundpipe_fx.compiler.values_on_host import hidden, host_copies, may_leave, wants_host
from roundpipe_fx.compiler.with_host import has_host, host_room, least_recomputed
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, tensor_values
from roundpipe_fx.ir.options import Options
from roundpipe_fx.ir.region import budget_of_region
from roundpipe_fx.passes.entry import Pass, PassContext, PassLevel
from roundpipe_fx.remat.choose import Chosen, choices, choose
from roundpipe_fx.remat.early import early_within
from roundpipe_fx.remat.follow_sequence import fit_sequence
from roundpipe_fx.remat.least_bytes import least_bytes
from roundpipe_fx.remat.save_policy import SavePolicy, recompute_rest, save_all, save_stage_inputs
from roundpipe_fx.remat.schedule import remat_schedule
from roundpipe_fx.remat.search import Candidate

__all__ = [
    "SAVE_POLICIES",
    "asked_budget",
    "bounded_in_bytes",
    "emit",
    "emit_by_policy",
    "lower",
    "prepare",
]

log = logging.getLogger(__name__)

SAVE_POLICIES: Mapping[str, SavePolicy] = {"none": save_all, "full": save_stage_inputs}


def lower(
    joint: JointGraph,
    options: Options,
    registered_syncs: Collection[Any] = (),
    training: bool = True,
    share: float = 1.0,
    workspaces: Mapping[str, int] | None = None,
    step: StepNeeds | None = None,
) -> Lowered:
    """Run the passes and emit stage modules and programs.

    Args:
        joint: a captured graph; it is rewritten.
        options: the user's.
        registered_syncs: operators that the user declared to force a host sync.
        training: whether the graph has a backward.
        share: of the budget that may be used.
        workspaces: what operators whose needs depend on data, and compiled stages, have been seen to allocate for
            themselves, by name.
        step: what else the step holds, where it makes several calls.

    Raises:
        InfeasibleBudgetError: the budget is below what the step needs at the least.
        ValueError: a stage name that does not exist in the model.
    """
    setting = _setting(joint, options, registered_syncs, workspaces, training, step=step)
    beyond = (workspaces or {}).get(COMPILED_STAGES, 0) if setting.compiler != "eager" else 0
    setting = dataclasses.replace(setting.knowing(runs_programs=True), share=share, beyond_plan=beyond)
    file = _plan_file(joint, setting)
    cached = file.read() if file is not None else None
    marking = _first_marking(setting.passes)
    joint = setting.run(joint, PassLevel.JOINT, stop=marking)
    if file is not None and cached is not None:
        try:
            return _recalled(joint, setting, cached)
        except (ValueError, TypeError, KeyError) as error:
            file.ignore(error)
            remove_marks(joint)
    unmarked = [node.name for node in joint.computed()]
    joint = setting.run(joint, PassLevel.JOINT, start=marking)
    budget = asked_budget(joint, options, setting.device) if training else None
    if step is not None and step.limit is not None:
        budget = step.limit
        setting = dataclasses.replace(setting, share=1.0)
    if budget is not None:
        lowered = plan_with_tiles(joint, options.tiling, budget, _tiling_steps(_looking_in_tiles(joint, setting)))
        if file is not None and not lowered.is_tiled:
            marks = marks_as_data(joint, unmarked, lowered.joint.segments, lowered.joint.cuts)
            if marks is not None:
                file.write(_to_cache(lowered, marks))
    else:
        joint = setting.run(cut(joint, setting), PassLevel.STAGED)
        lowered = (
            emit_by_policy(joint, setting, SAVE_POLICIES[options.recompute or "none"])
            if training
            else emit(joint, setting)
        )
    if isinstance(setting.costs, MeasuredCosts):
        setting.costs.save()
    write_trials(setting.device)
    log.info("%s", lowered.plan)
    return lowered


def prepare(
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

    Arguments as for :func:`_setting`.
    """
    setting = _setting(joint, options, registered_syncs, workspaces, training, microbatches, step, network)
    return setting.run(joint, PassLevel.JOINT), setting


def _setting(
    joint: JointGraph,
    options: Options,
    registered_syncs: Collection[Any],
    workspaces: Mapping[str, int] | None = None,
    training: bool = True,
    microbatches: int = 1,
    step: StepNeeds | None = None,
    network: Network | None = None,
) -> Setting:
    """What there is to know beside a captured graph.

    Args:
        joint: a captured graph; it is rewritten.
        options: the user's.
        registered_syncs: operators that the user declared to force a host sync.
        workspaces: what operators and compiled stages have been seen to allocate for themselves, by name.
        training: whether the graph has a backward.
        microbatches: into how many a batch is split.
        step: what else the step holds, where it makes several calls.
        network: the links between all ranks, for which one plan is made; ``None``: each process plans for itself.
    """
    device = options.device or _device_of(joint)
    context = PassContext(
        options=options,
        device=device,
        compiler=options.stage_compiler_for(device),
        costs=cost_model(options.cost, device, options.device_name, network),
        training=training,
        registered_syncs=registered_syncs,
        workspaces=workspaces,
        microbatches=microbatches,
        one_plan=network is not None,
        dump=dump_folder(joint),
    )
    return Setting(passes=edited_passes(options.passes), context=context, step=step)


def _first_marking(passes: Sequence[Pass]) -> int:
    """Position of the first pass that only marks nodes."""
    return next((place for place, item in enumerate(passes) if item.name == FIRST_MARKING_PASS), len(passes))


def bounded_in_bytes(joint: JointGraph, options: Options) -> bool:
    """Whether the budget of a training graph is bytes, whatever its sizes."""
    if isinstance(options.memory_budget, int) or options.rotor is not None:
        return True
    device = options.device or _device_of(joint)
    by_default = options.memory_budget is None and options.recompute is None and options.device_name is None
    return by_default and device.type == "cuda"


def asked_budget(joint: JointGraph, options: Options, device: torch.device) -> int | float | None:
    """The budget to plan for; ``None``: as the option ``recompute`` says."""
    if options.rotor is not None:
        return options.rotor.limit
    if options.memory_budget is not None:
        return options.memory_budget
    if options.recompute is None and options.device_name is None and device.type == "cuda":
        return default_budget(device)
    forward = joint.in_phase(Phase.FORWARD)
    if any(budget_of_region(node) is not None for node in forward):
        return 1.0
    if options.recompute != "full" and any(Mark.MUST_RECOMPUTE in node.meta for node in forward):
        return 1.0  # regions are recomputed just in time, which is the planner's work
    return None


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
        split: see :func:`emit`.
        sums: see :func:`emit`.
        known: see :func:`emit`.
    """
    schedule = recompute_rest(joint, policy(joint))
    return emit(joint, setting.knowing(schedule=schedule, early=True), split=split, sums=sums, known=known)


def _looking_in_tiles(joint: JointGraph, setting: Setting) -> Setting:
    """The same for a graph whose plan tells, when it is asked, what plans in tiles reach."""
    options = setting.options
    if options.tiling == "never" or options.rotor is not None:
        return setting
    return dataclasses.replace(setting, read_in_tiles=functools.partial(plans_in_tiles, joint, setting))


def _tiling_steps(setting: Setting) -> TilingSteps:
    return TilingSteps(
        summed=lambda joint: summed(joint, setting),
        tiled=lambda joint, tiles: tiled(joint, tiles, setting),
        by_class=lambda joint: class_regions(joint, setting.costs),
        by_segment=lambda joint, regions, limit: tilings_by_segment(joint, regions, limit, setting),
        planned=lambda joint, budget, limit: _within(cut(joint, setting), setting, budget, limit),
        share=setting.share,
    )


def _plan_file(joint: JointGraph, setting: Setting) -> PlanFile | None:
    """Where the plan of a captured graph is cached; ``None`` if it is planned each time."""
    options, context = setting.options, setting.context
    budget = asked_budget(joint, options, setting.device)
    customized = options.passes is not None or options.rotor is not None or not isinstance(setting.compiler, str)
    if budget is None or customized or not context.training or setting.step is not None or options.cost != "roofline":
        return None
    return plan_file(
        joint,
        device=setting.device,
        costs=setting.costs,
        options=(options, budget, setting.share, setting.compiler),
        registered_syncs=context.registered_syncs,
        workspaces=context.workspaces or {},
    )


def _to_cache(lowered: Lowered, marks: Any) -> CachedPlan:
    chosen, schedule = lowered.chosen, lowered.setting.context.schedule
    assert isinstance(chosen, Chosen) and schedule is not None
    return CachedPlan(
        limit=chosen.limit,
        peak=lowered.peak.bytes,
        frontier=chosen.frontier,
        sent=lowered.setting.sent,
        room=lowered.setting.room,
        shared=chosen.followed is not chosen.graph,
        schedule=schedule_as_data(schedule),
        marks=marks,
    )


def _recalled(joint: JointGraph, setting: Setting, cached: CachedPlan) -> Lowered:
    """Emit a cached plan.

    Args:
        joint: a graph before the first pass that only marks nodes; it is marked.
        setting: what else there is to know.
        cached: the plan.

    Raises:
        ValueError: it does not fit the graph, or what is emitted does not peak where it should.
        TypeError: it is no plan.
        KeyError: it is no plan.
    """
    joint = mark_as_cached(joint, cached.marks)
    # Copies are made as in planning: nodes that passes add to them are named by what else has been there.
    whole = setting.knowing(everything_saved=True).run(joint.copy(), PassLevel.STAGED) if cached.shared else joint
    copy = whole.copy()
    schedule = schedule_from_data(cached.schedule, copy)

    @functools.cache
    def operations() -> OperationGraph:
        return operations_of(setting.run(joint, PassLevel.STAGED), setting)

    recalled = Recalled(cached.limit, cached.frontier, operations)
    looking = dataclasses.replace(_looking_in_tiles(joint, setting), sent=cached.sent, room=cached.room)
    lowered = emit(copy, looking.knowing(schedule=schedule), chosen=recalled)
    if lowered.peak.bytes != cached.peak:
        raise ValueError(f"its programs peak at {lowered.peak.bytes} bytes, not {cached.peak}")
    log.info("%s", lowered.plan)
    return lowered


@dataclass(frozen=True, kw_only=True)
class _CutGraph:
    """A graph that is cut into stages, for which plans are made.

    Attributes:
        joint: the graph.
        shared: the same with equal values shared; ``None``: there are none.
        operations: of the graph.
        whole: of ``shared``.
        setting: what else there is to know.
    """

    joint: JointGraph
    shared: JointGraph | None
    operations: OperationGraph
    whole: OperationGraph | None
    setting: Setting

    @classmethod
    def of(cls, joint: JointGraph, setting: Setting) -> _CutGraph:
        """That of a graph with segments."""
        step = with_gradients(setting.step, joint)
        shared = without_common_subexpressions(joint, setting) if setting.options.rotor is None else None
        joint = setting.run(joint, PassLevel.STAGED)
        operations = dataclasses.replace(operations_of(joint, setting), step=step)
        whole = None if shared is None else dataclasses.replace(operations_of(shared, setting), step=step)
        return cls(joint=joint, shared=shared, operations=operations, whole=whole, setting=setting)

    @functools.cached_property
    def beside(self) -> Any:
        """What the early part of recomputations may run beside."""
        return stages_to_overlap(self.joint, _full(self.setting))

    def emitted(self, chosen: Chosen, sent: int = 0) -> Lowered:
        """Emitted as chosen. Programs may need a little more than was planned: then nothing is early.

        Args:
            chosen: the plan.
            sent: bytes of values that leave for the host, if as many have the time.
        """
        followed, schedule = chosen.followed, chosen.candidate.schedule
        early = early_within(followed, schedule, self.beside)
        setting = dataclasses.replace(self.setting, sent=sent)
        for tried in (schedule,) if early is schedule else (early, schedule):
            copy = (self.joint if followed is not self.whole or self.shared is None else self.shared).copy()
            remat = remat_schedule(followed, tried).on(copy.graph)
            lowered = emit(copy, setting.knowing(schedule=remat), chosen=chosen)
            if lowered.peak.bytes <= chosen.limit:
                break
        return lowered


def _within(joint: JointGraph, setting: Setting, budget: int | float, limit: int | None) -> Lowered:
    """Plan for a budget, with values on the host where that saves recomputation, or where no plan fits without it.

    Args:
        joint: a graph with segments.
        setting: what else there is to know.
        budget: bytes or a share.
        limit: where one operation alone needs more bytes, no plan is searched for; ``None``: one always is.

    Raises:
        UnmetError: no plan stays within it.
    """
    graph = _CutGraph.of(joint, setting)
    options, operations = setting.options, graph.operations
    runs = setting.context.runs_programs
    wanted = runs and wants_host(graph.joint, setting.device.type)
    if limit is not None and options.rotor is None and not wanted:
        least = least_bytes(operations)
        if least.bytes > limit:
            raise UnmetError(Needs(bytes=least.bytes, operation=least.operation, live=least.live))
    if wanted and isinstance(budget, int) and options.rotor is None:
        return _first_within(_some_of(choices(operations, budget, setting.share, graph.whole)), graph.emitted)
    without: Lowered | UnmetError
    try:
        without = _without_host(graph, budget)
    except UnmetError as error:
        without = error
    room = host_room(options.host_budget, on_paper=options.device_name is not None)
    several = options.rotor is not None or setting.step is not None
    if runs and room and not wanted and not several and has_host(setting.device):
        on_host = _with_host(graph, without, room)
        if on_host is not None:
            return on_host
    if isinstance(without, UnmetError):
        raise without
    return without


def _with_host(graph: _CutGraph, without: Lowered | UnmetError, room: int) -> Lowered | None:
    """A plan that recomputes less than one without values on the host, or fits where none does without.

    Args:
        graph: for which plans are made.
        without: the plan without values on the host, or what it needs at the least.
        room: bytes of values that may be on the host.

    Raises:
        UnmetError: no plan fits, and with values on the host less is needed than without.
    """
    chosen = without.chosen
    assert isinstance(chosen, Chosen)
    graph = dataclasses.replace(graph, setting=dataclasses.replace(graph.setting, room=room))
    plans = choices(graph.operations, chosen.limit, 1.0, graph.whole)
    if isinstance(without, Lowered):
        plans = [plan for plan in plans if plan.candidate.seconds < chosen.candidate.seconds]
    if not plans:
        return None
    lowered, place = least_recomputed(plans, graph.emitted, room)
    if lowered.peak.bytes <= chosen.limit:
        return lowered
    if isinstance(without, UnmetError) and lowered.peak.bytes < without.needs.bytes:
        raise UnmetError(Needs.of_plan(plans[place], lowered.peak.bytes), plans[place])
    return None


def _without_host(graph: _CutGraph, budget: int | float) -> Lowered:
    """Plan for a budget. A plan whose emitted programs are simulated to exceed it is not used.

    Args:
        graph: for which plans are made.
        budget: bytes or a share.

    Raises:
        UnmetError: no plan stays within it.
    """
    setting, operations = graph.setting, graph.operations
    rotor = setting.options.rotor
    margin = 0
    emitted: list[tuple[Candidate, int]] = []
    while True:
        if rotor is None:
            chosen = choose(operations, budget, setting.share, margin, graph.whole, emitted)
        else:
            limit = int(rotor.limit * setting.share)
            fitted = fit_sequence(operations, limit - margin, rotor.slots, rotor.algo, rotor.loss_temporary)
            frontier = ((fitted.candidate.peak.bytes, fitted.candidate.seconds),)
            chosen = Chosen(
                candidate=fitted.candidate, limit=limit, graph=operations, frontier=frontier, followed=operations
            )
        lowered = graph.emitted(chosen)
        excess = lowered.peak.bytes - chosen.limit
        if excess <= 0:
            return lowered
        if not chosen.fits:
            raise UnmetError(Needs.of_plan(chosen, lowered.peak.bytes), chosen)
        emitted.append((chosen.candidate, lowered.peak.bytes))
        log.info("the programs exceed the budget by %d bytes more than was planned; replanning", excess)
        margin += excess


_EMITTED = 24
"""Plans that are emitted at most, where it is known only then what they need."""


def _some_of(plans: Sequence[Chosen]) -> list[Chosen]:
    """The first, the last, and some between them."""
    last = len(plans) - 1
    return [plans[place] for place in sorted({round(last * part / (_EMITTED - 1)) for part in range(_EMITTED)})]


def _first_within(plans: Sequence[Chosen], lowered_by: Callable[[Chosen], Lowered]) -> Lowered:
    """The first of some plans whose programs stay within the limit.

    Raises:
        UnmetError: none does; with the one that needs least.
    """
    needs: list[tuple[int, Chosen]] = []
    for chosen in plans:
        lowered = lowered_by(chosen)
        if lowered.peak.bytes <= chosen.limit:
            return lowered
        needs.append((lowered.peak.bytes, chosen))
    least, chosen = min(needs, key=lambda need: need[0])
    raise UnmetError(Needs.of_plan(chosen, least), chosen)


def emit(
    joint: JointGraph,
    setting: Setting,
    *,
    chosen: Chosen | Recalled | None = None,
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
    setting = setting.knowing(split=split, sums=sums)
    joint = setting.run(joint, PassLevel.PLANNED)
    seconds: dict[tuple[int, Phase], float] = {}
    unfilled = Unfilled(_full(setting))
    recompute_seconds = 0.0
    for node in joint.computed():
        key = node.meta[Mark.STAGE], node.meta[Mark.PHASE]
        seconds[key] = seconds.get(key, 0.0) + node.meta[Mark.SECONDS]
        unfilled.add(key, node)
        recompute_seconds += node.meta[Mark.SECONDS] if Mark.ORIGIN in node.meta else 0.0

    def rewrite(graph: fx.Graph) -> fx.Graph:
        return run_passes(graph, setting.passes, PassLevel.STAGE_MODULE, setting.context)

    modules = emit_stage_modules(joint, rewrite, known)
    forward = emit_forward_program(joint, modules)
    backward = emit_backward_program(joint, modules) if training else None
    tangents = joint.expected_tangents if setting.compiler == "eager" else joint.tangents
    if backward is not None:
        if setting.context.runs_programs and setting.device.type != "cpu":
            granularity = allocation_granularity(setting.device)
            where = joint, forward, backward, tangents, _device_of(joint).type, granularity
            copies = host_copies(*where)
            if setting.sent:
                byte_seconds = 1 / _roofline(setting).host
                least, most = setting.sent, setting.room
                copies = hidden(may_leave(*where), forward, backward, seconds, byte_seconds, least, most)
            setting = setting.knowing(host_copies=copies)
        away = {copy.value for copy in setting.context.host_copies}
        # The copy back of a value is waited for on the main stream alone.
        reading = {call.name for call in backward.calls if any(node.name in away for node in call.inputs)}
        overlapped = modules_to_overlap(joint, backward, unfilled) - reading
        _rewrite_program(backward, setting, overlapped)
    _rewrite_program(forward, setting)
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
    )


def _rewrite_program(program: Program, setting: Setting, overlapped: Collection[str] = ()) -> None:
    context = dataclasses.replace(setting.context, program=program.name, overlapped=overlapped)
    run_passes(program.module.graph, setting.passes, PassLevel.PROGRAM, context)


def _full(setting: Setting) -> int:
    """Elements of a result from which on a kernel fills the device."""
    return _roofline(setting).full


def _roofline(setting: Setting) -> Roofline:
    return roofline_of(setting.device, setting.options.device_name)


def _device_of(joint: JointGraph) -> torch.device:
    """The device that the work runs on: the first accelerator among the graph's values, else the CPU."""
    for node in joint.graph.nodes:
        for value in tensor_values(node):
            if value.device.type not in ("cpu", "meta"):
                return value.device
    return torch.device("cpu")
