"""Compilation of one graph: AOTAutograd's callbacks, from a joint graph to programs and back to a callable.

AOTAutograd gets graphs of stage calls back.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx

from roundpipe_fx import torch_private
from roundpipe_fx.analysis.cost import COMPILED_STAGES
from roundpipe_fx.analysis.outside_loss import expect_loss, lasting_bytes, returned_view_bytes
from roundpipe_fx.analysis.simulator import allocation_granularity
from roundpipe_fx.analysis.step_of_calls import StepNeeds
from roundpipe_fx.api.callers_outputs import CallersOutputs, PlannedOutputs
from roundpipe_fx.api.initial_split_budget import lower_as_one_of
from roundpipe_fx.api.learned import Learned
from roundpipe_fx.budget import Found, Infeasible, Result, plan_or_error
from roundpipe_fx.codegen import Program, seen_by_autograd
from roundpipe_fx.compiler.emit import device_of
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.distributed.tensor_parallel import redistribute_gradients
from roundpipe_fx.frontend.capture import capture, is_outermost, joint_graph_of, prepare
from roundpipe_fx.frontend.graph_breaks import warn_of_graph_break
from roundpipe_fx.frontend.invalid_backward import warn_of_redrawn_numbers
from roundpipe_fx.frontend.opaque_backward import OpaqueCall
from roundpipe_fx.frontend.own_gradients import own_gradients
from roundpipe_fx.frontend.size_range import lower_for_sizes
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, is_tensor
from roundpipe_fx.ir.options import Options
from roundpipe_fx.ir.text import joint_text
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline
from roundpipe_fx.pipeline.pipelined_graph import (
    OutputObservers,
    PipelinedGraph,
    StepObservers,
    compile_pipelined_graph,
)
from roundpipe_fx.pipeline.settings import COUNT_OF_BATCH, Pipelining, StepCompileState, StepSetting
from roundpipe_fx.planner.lower import is_bounded_in_bytes, lower, requested_budget
from roundpipe_fx.planner.lower_pipeline import lower_pipeline
from roundpipe_fx.report.make_plan import plan_of, with_dropped_outputs
from roundpipe_fx.report.out_of_memory_text import planned_memory
from roundpipe_fx.report.pipeline_plan import plan_of_pipeline
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.runtime.bridge import make_pipelined_forward, respect_trace_only
from roundpipe_fx.runtime.dropped_outputs import DroppedOutputs
from roundpipe_fx.runtime.executor import load_program
from roundpipe_fx.runtime.incoming_gradients import (
    drop_unused_gradients,
    fill_missing_gradients,
    observe_unexpected_gradients,
    record_outputs,
)
from roundpipe_fx.runtime.library_memory import library_bytes, touch_libraries, touch_libraries_in_backward
from roundpipe_fx.runtime.observers import size_observer
from roundpipe_fx.runtime.profiled_step import ProfiledStep
from roundpipe_fx.runtime.stage_compiler import Boxed, compile_stages
from roundpipe_fx.runtime.step_calls import NotedGraph
from roundpipe_fx.runtime.unread_outputs import UnreadOutputs
from roundpipe_fx.torch_private import UserLine

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(kw_only=True)
class _Compilation:
    """The callbacks of AOTAutograd's for one graph, as far as they are the same on one device and in a pipeline."""

    options: Options
    registered_syncs: Collection[Any]
    learned: Learned
    name: str
    operations_name: str
    labels: list[tuple[str, bool]]
    autocast: frozenset[str]
    own_gradients: tuple[str, ...]
    on_plan: Callable[[Plan], None]
    opaque: list[OpaqueCall] = field(default_factory=list)
    """Held until all stages are compiled, which hold what they call."""
    lowered: Lowered = field(init=False)
    plan: Plan = field(init=False)
    differentiated: Sequence[int] = ()

    def partition(
        self, joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        # Graphs inside operators with bodies reach the partitioner as well; only the whole one is planned.
        if not is_outermost(joint):
            return torch_private.default_partition(joint, _inputs, num_fwd_outputs=num_fwd_outputs)
        # Which outputs have incoming gradients is read before anything else changes the graph.
        self.differentiated = torch_private.differentiated_outputs(joint)
        view = self._view(joint, num_fwd_outputs)
        warn_of_redrawn_numbers(view)
        torch_private.trace_artifact("roundpipe_fx_captured_graph", lambda: joint_text(view))
        return self._plan(view)

    def _plan(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan a step, and tell of it; returns what autograd is to call."""
        raise NotImplementedError

    def inference(self, module: fx.GraphModule, _inputs: Sequence[Any]) -> Boxed:
        outputs = module.graph.output_node().args[0]
        joint = self._view(module, len(outputs))  # type: ignore[arg-type]
        return self._evaluated(joint)

    def _evaluated(self, joint: JointGraph) -> Boxed:
        """Plan what computes no gradients, and tell of it; returns what runs it."""
        raise NotImplementedError

    def _tell(self, read_plan: Callable[[T], Plan], finished: T) -> None:
        with torch_private.without_modes():
            plan = self.plan = read_plan(finished)
        log.info("%s", plan)
        torch_private.trace_artifact("roundpipe_fx_plan", plan.details)
        self.on_plan(plan)

    def _for_sizes(
        self,
        view: JointGraph,
        lower: Callable[[JointGraph], Result[T]],
        lowered_of: Callable[[T], Lowered],
    ) -> Result[T]:
        """Lower a graph for the sizes that it is to be used with."""
        assumed = self.learned.of_graph(self.name)
        with torch_private.without_modes():
            # A budget in bytes bounds the largest sizes that the plan is made for, so these are found first.
            if is_bounded_in_bytes(view, self.options):
                return lower_for_sizes(view, assumed, lower, lambda result: lowered_of(result).recompute_seconds > 0)
            torch_private.assume_sizes(view.module, assumed)
            return lower(view)

    def _see_size(self, symbol: str, size: int) -> None:
        self.learned.see(f"{self.name}/{symbol}", size)

    def _view(self, module: fx.GraphModule, num_forward_outputs: int) -> JointGraph:
        with torch_private.without_modes():
            joint = joint_graph_of(module, num_forward_outputs, self.labels, self.own_gradients)
            return expect_loss(joint, self.autocast, self.learned.observed_tangents(self.operations_name))


@dataclass(kw_only=True)
class _OnOneDevice(_Compilation):
    """The callbacks for a graph whose programs AOTAutograd's runtime calls."""

    call_name: str
    compiled: dict[str, Boxed] = field(default_factory=dict)
    profiled: ProfiledStep | None = None
    noted: NotedGraph | None = None
    outputs: CallersOutputs = field(init=False)
    respect_trace_only: DroppedOutputs | None = None
    unread: UnreadOutputs | None = None

    def _plan(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.outputs = CallersOutputs(self.name, joint, self.options, self.learned)
        joint = dataclasses.replace(joint, dropped=self.outputs.assumed_dropped)
        self.lowered = plan_or_error(self._for_sizes(joint, self._lower, lambda lowered: lowered))
        torch_private.trace_artifact("roundpipe_fx_planned_graph", lambda: joint_text(self.lowered.joint))
        self._tell(plan_of, self.lowered)
        self.noted = self._noted(self.lowered, self.differentiated)
        assert self.lowered.backward is not None
        return self.lowered.forward.module, self.lowered.backward.module

    def _lower(self, joint: JointGraph) -> Result[Lowered]:
        def lower_with(joint: JointGraph, options: Options, step: StepNeeds | None) -> Result[Lowered]:
            learned = self.learned
            if learned.runs_eagerly(self.name):
                # Inductor failed on this graph before: its stages run eagerly from then on.
                options = dataclasses.replace(options, stage_compiler="eager", inductor_options=())
            return lower(
                joint,
                options,
                self.registered_syncs,
                share=learned.share,
                workspaces=learned.workspaces,
                step=step,
                droppable=self.outputs.assumed_if_needed,
                unread=self.outputs.assumed_unread,
                may_be_unread=self.outputs.unread_if_needed,
            )

        parts = self.learned.steps.expected_parts
        # The first step of a model with several graphs: each is planned for its part of the budget.
        if parts > 1 and self.options.memory_budget is not None:
            return lower_as_one_of(joint, parts, self.options, lower_with)
        result = lower_with(joint, self.options, self.learned.steps.needs(self.call_name))
        return self.outputs.explain(result, joint) if isinstance(result, Infeasible) else result

    def _noted(self, lowered: Lowered, differentiated: Sequence[int]) -> NotedGraph | None:
        """The name under which steps record calls of this graph; ``None`` if that would not change any plan."""
        if self.options.rotor is not None:
            return None
        training = lowered.backward is not None
        asked = requested_budget(lowered.joint, self.options, lowered.setting.device)
        if asked is None:
            return None
        operations = lowered.chosen.read_operations if lowered.chosen is not None else None
        name, footprint = self.call_name, lowered.footprint
        self.learned.steps.plan(name, footprint, operations, lowered.budget or 0, asked)
        outputs = lowered.forward.outputs
        return NotedGraph(
            name=name,
            footprint=footprint,
            outputs=outputs,
            parameters=lowered.parameters,
            differentiated=frozenset(differentiated),
            training=training,
        )

    def forward(self, _module: fx.GraphModule, _inputs: Sequence[Any]) -> Boxed:
        # Wrappers from the inside out: the program, the record of calls, the profile, incoming gradients, observed
        # outputs, explanations of out-of-memory errors.
        run = self._load(self.lowered, self.lowered.forward, self._see())
        if self.noted is not None:
            run = self.learned.calls.forward(run, self.noted)
        self.profiled = self._profile(self.lowered)
        if self.profiled is not None:
            run = self.profiled.forward(run)
        self.observed = self.outputs.observe(self.lowered, self._correct)
        if self.observed is not None:
            run = self.observed.forward(run)
        self.unread = self.outputs.leave_unread(self.lowered)
        if self.unread is not None:
            run = self.unread.forward(run)
        outputs, gradients = self.lowered.joint.num_forward_outputs, self._incoming()
        if outputs == 1:  # a backward always reads its gradient
            pass
        elif self.lowered.static:
            run = record_outputs(run, outputs, None)
        elif gradients is not None:
            traced = [
                (position, node.meta["val"]) for position, node in zip(self.differentiated, gradients, strict=True)
            ]
            run = record_outputs(run, outputs, traced)
        see = size_observer(self.lowered.forward.results, self._see_size) if self.lowered.budget is not None else None
        return respect_trace_only(self._explained(run, self.lowered, "forward"), see)

    def _explained(self, run: Boxed, lowered: Lowered, phase: str) -> Boxed:
        """Wrap a program so that its out-of-memory errors say what the step has allocated, and what was planned."""
        learned, device, share = self.learned, lowered.setting.device, self.learned.share

        def begin() -> None:
            if not learned.calls.are_alive():
                learned.memory.begin([device])

        begins = begin if phase == "forward" and device.type == "cuda" else None
        return learned.memory.explained(run, phase, lambda: planned_memory(self.plan, share), begins)

    def _correct(self, lowered: Lowered) -> None:
        """Report a corrected plan, after a step has shown that its programs need other bytes."""
        self._tell(functools.partial(with_dropped_outputs, self.plan), lowered)

    def _incoming(self) -> list[fx.Node] | None:
        """The incoming gradients of the differentiated outputs; ``None`` if one has several, of a tensor subclass."""
        gradients = [node for node in self.lowered.joint.tangents if not torch_private.is_effect_token(node)]
        plain = len(gradients) == len(self.differentiated) and all(is_tensor(node) for node in gradients)
        return gradients if plain else None

    def backward(self, _module: fx.GraphModule, _inputs: Sequence[Any]) -> Boxed:
        assert self.lowered.backward is not None
        # The same wrappers as around the forward, in the same order.
        run = self._explained(self._load(self.lowered, self.lowered.backward, self._see()), self.lowered, "backward")
        if self.unread is not None:
            run = self.unread.backward(run)
        if self.observed is not None:  # before outputs are computed, which no longer hold what they are computed from
            run = self.observed.backward(run)
        gradients = self._incoming()
        if gradients is not None and not self.lowered.static:
            strides_matter = self.lowered.stage_compiler != "eager"
            inputs = self.lowered.backward.inputs
            run = fill_missing_gradients(
                run, {inputs.index(n): strides_matter or Mark.STRIDED in n.meta for n in gradients}
            )
        if self.noted is not None:
            run = self.learned.calls.backward(run, self.noted)
        if self.profiled is not None:
            run = self.profiled.backward(run)
        # Gradients that no step was expected to pass: seeing one is a reason to plan anew.
        unexpected = {node.name for node in self.lowered.joint.tangents} - {node.name for node in self.lowered.tangents}
        if self.lowered.budget is None or not unexpected:
            return run
        positions = {i: node.name for i, node in enumerate(self.lowered.backward.inputs) if node.name in unexpected}
        return observe_unexpected_gradients(run, positions, self._see_gradient)

    def _see_gradient(self, name: str) -> None:
        """Note an incoming gradient that was not expected."""
        self.learned.observe_tangent(self.operations_name, name)
        values = [node.meta["val"] for node in self.lowered.joint.tangents if node.name == name]
        size = sum(torch_private.size_hint(value.numel()) * value.dtype.itemsize for value in values)
        self._warn_of_uncounted("the gradient of an output beside the loss", size)

    def _see_workspace(self, operator: str, size: int) -> None:
        self.learned.see_workspace(operator, size)
        self._warn_of_uncounted(f"what {operator} allocates beside its results", size)

    def _warn_of_uncounted(self, what: str, size: int) -> None:
        assert self.lowered.budget is not None
        self.learned.steps.warn_of_uncounted(what, size, self.lowered.peak.bytes, self.lowered.budget)

    def _profile(self, lowered: Lowered) -> ProfiledStep | None:
        """Measures in a step whether compiled stages exceed the budget; ``None`` if there is none.

        Eager stages hold what was planned. Bytes that compiled ones hold beyond that are counted in all plans. Both
        ends of a share grow by as much, so the next plan recomputes the same, and its budget is what a step takes.
        """
        if lowered.stage_compiler == "eager" or lowered.budget is None:
            return None
        assert lowered.backward is not None
        budget, beyond = lowered.budget, lowered.setting.beyond_plan
        others = lowered.peak.bytes - lowered.call_peak.bytes

        def see(peak: int) -> None:
            # What compiled stages hold beyond what the plan counts without its own allowance for them.
            excess = peak - (lowered.call_peak.bytes - beyond)
            if peak + others <= budget:
                return
            self.learned.see_workspace(COMPILED_STAGES, excess)
            self._warn_of_uncounted("what compiled stages hold", excess - beyond)

        device = lowered.setting.device
        granularity = allocation_granularity(device)
        outside = lasting_bytes(lowered.tangents, granularity) + returned_view_bytes(lowered.joint, granularity)
        return ProfiledStep(
            forward=lowered.forward,
            backward=lowered.backward,
            device_type=device.type,
            see=see,
            outside=outside,
            released=[*lowered.updates, *sorted(lowered.joint.dropped)],
            graph=lowered.joint.module.graph,
        )

    def _evaluated(self, joint: JointGraph) -> Boxed:
        with torch_private.without_modes():
            lowered = plan_or_error(lower(joint, self.options, self.registered_syncs, training=False))
        self._tell(plan_of, lowered)
        run = self._load(lowered, lowered.forward, None)
        noted = self._noted(lowered, ())
        run = run if noted is None else self.learned.calls.forward(run, noted)
        return respect_trace_only(self._explained(run, lowered, "forward"))

    def _see(self) -> Callable[[str, int], None] | None:
        return self._see_workspace if self.lowered.budget is not None else None

    def _load(self, lowered: Lowered, program: Program, see: Callable[[str, int], None] | None) -> Boxed:
        failed = functools.partial(self.learned.see_failure, self.name) if lowered.budget is not None else None
        in_order = lowered.runs_in_order
        stages = compile_stages(program.calls, lowered.stage_compiler, self.compiled, see, in_order, failed)
        return load_program(program, stages, strided=lowered.stage_compiler != "eager")


@dataclass(kw_only=True)
class _InPipeline(_Compilation):
    """The callbacks for a graph whose stages a pipeline runs, forward and backward."""

    pipelining: Pipelining
    step: StepSetting
    graph: PipelinedGraph = field(init=False)
    outputs: CallersOutputs = field(init=False)

    def _plan(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.outputs = CallersOutputs(self.name, joint, self.options, self.learned)
        lowered = self._lower(joint)
        if isinstance(lowered, Infeasible) and self._may_leave_unread:
            lowered = self.outputs.explain(lowered, joint)
        pipeline = plan_or_error(lowered)
        seen = StepObservers(self._see_size, self.learned.see_workspace) if pipeline.budget is not None else None
        self.graph = compile_pipelined_graph(
            pipeline, self.differentiated, self.pipelining.loss_reduction, seen, self._observe_outputs(pipeline)
        )
        self.lowered = pipeline.main.lowered
        torch_private.trace_artifact("roundpipe_fx_planned_graph", lambda: joint_text(self.lowered.joint))
        self._tell(plan_of_pipeline, self.graph)
        assert self.lowered.backward is not None
        return self.lowered.forward.module, seen_by_autograd(self.lowered.backward)

    @property
    def _may_leave_unread(self) -> bool:
        """Permission to leave out outputs that the caller does not read: not of a step that is asked for them, nor
        between processes."""
        return self.step.forwards_before_backwards and not self.pipelining.over_processes

    def _observe_outputs(self, pipeline: LoweredPipeline) -> OutputObservers:
        """The callbacks for what the caller does with the outputs of a pipeline's calls."""
        lowered = pipeline.main.lowered
        planned = PlannedOutputs(
            joint=lowered.joint,
            calls=self.pipelining.microbatches,
            budget=pipeline.budget,
            read_tight=lambda: lowered.is_tight or bool(self.plan.pipeline and self.plan.pipeline.sent_bytes),
            read_peak=lambda: self.plan.peak_bytes,
        )
        return OutputObservers(
            read=functools.partial(self.outputs.see_read, planned),
            dropped=functools.partial(self.outputs.see_dropped, planned),
        )

    def _lower(self, view: JointGraph) -> Result[LoweredPipeline]:
        """The pipeline within the share of the budget that may be used; or else the one that needs least, where that is
        within the budget, or microbatches of other sizes may make it so."""
        lower_with = functools.partial(
            lower_pipeline,
            pipelining=self.pipelining,
            registered_syncs=self.registered_syncs,
            like=self.step.structure,
            forwards_before_backwards=self.step.forwards_before_backwards,
            workspaces=self.learned.workspaces,
            unread=self.outputs.assumed_unread if self._may_leave_unread else frozenset(),
            may_be_unread=self.outputs.unread_if_needed if self._may_leave_unread else frozenset(),
        )

        def lower(joint: JointGraph, options: Options, share: float = 1.0) -> Result[LoweredPipeline]:
            run_passes = functools.partial(lower_with, options=options, share=share)
            return self._for_sizes(joint, run_passes, lambda pipeline: pipeline.main.lowered)

        # Lowering rewrites the graph; a second attempt needs a copy.
        spare = view.copy() if self.step.sizes_differ or self.learned.share < 1 else None
        allowed = requested_budget(view, self.options, self.options.device or device_of(view))
        result = lower(view, self.options, self.learned.share)
        if isinstance(result, Found) or spare is None or not isinstance(allowed, int):
            return result
        # No microbatch of another size can help: the refusal stands.
        if result.minimum > allowed and not self.step.sizes_differ:
            return result
        # The least that this microbatch needs: together with smaller ones it may fit, which is checked before the step
        # runs.
        least = lower(spare, dataclasses.replace(self.options, memory_budget=result.minimum))
        if isinstance(least, Infeasible):
            return least
        budget = None if least.value.budget is None else max(least.value.budget, allowed)
        return Found(dataclasses.replace(least.value, budget=budget, allowed=allowed, refused=result))

    def forward(self, _module: fx.GraphModule, _inputs: Sequence[Any]) -> Boxed:
        kept = self.lowered.forward.results[self.lowered.forward.outputs :]
        return make_pipelined_forward(self.graph, [_stand_in(node) for node in kept])

    def backward(self, _module: fx.GraphModule, _inputs: Sequence[Any]) -> Boxed:
        return _never_called  # the pipeline runs it

    def _evaluated(self, joint: JointGraph) -> Boxed:
        with torch_private.without_modes():
            pipeline = lower_pipeline(
                joint,
                self.options,
                self.pipelining,
                self.registered_syncs,
                training=False,
                like=self.step.structure,
            )
        graph = compile_pipelined_graph(plan_or_error(pipeline), [], self.pipelining.loss_reduction)
        self._tell(plan_of_pipeline, graph)
        return make_pipelined_forward(graph, [])


def compile_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    registered_syncs: Collection[Any],
    on_plan: Callable[[Plan], None],
    warned: set[UserLine],
    learned: Learned | None = None,
    pipelining: Pipelining | None = None,
    compile_state: StepCompileState | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's.

    Args:
        registered_syncs: operators that the user declared to force a host sync.
        on_plan: called with each plan that is made.
        warned: lines of graph breaks that the user has been warned of; extended.
        learned: what plans assume about run time; steps extend it.
        pipelining: how microbatches are pipelined; ``None``: they are not.
        compile_state: how the first graph of the current step was cut.
    """
    learned = learned or Learned()
    warn_of_graph_break(module, warned, options.memory_budget is not None, learned.steps.runs_eagerly)
    prepare(module)
    if pipelining is not None and pipelining.over_processes:
        redistribute_gradients(module)
    labels = [torch_private.input_path(node) for node in module.graph.find_nodes(op="placeholder")]
    name = hashlib.sha256(str(module.graph).encode()).hexdigest()[:8]
    make: Callable[..., _OnOneDevice | _InPipeline]
    if pipelining is None:
        devices = _touched_devices(example_inputs)
        make = functools.partial(_OnOneDevice, call_name=f"{name} {_shapes(example_inputs)}", own_gradients=())
    else:
        # Workers of a pipeline have streams of their own, which they have touched, or will when they start.
        devices = list(pipelining.devices) or _cuda_devices(example_inputs)
        state = compile_state or StepCompileState()
        # Each microbatch's loss is divided by the whole batch's count already, so they are summed.
        # Losses that are divided by the count of the whole batch are parts of one mean.
        parts = state.step.counted and torch_private.reads_input(module, COUNT_OF_BATCH)
        pipelining = dataclasses.replace(
            pipelining,
            offloaded=state.step.offloaded,
            loss_reduction="sum" if parts else pipelining.loss_reduction,
            optimizer=state.optimizer,
        )
        make = functools.partial(
            _InPipeline, pipelining=pipelining, step=state.step, own_gradients=own_gradients(module)
        )
    compilation = make(
        options=options,
        registered_syncs=registered_syncs,
        learned=learned,
        name=name,
        operations_name=_operations_name(module),
        labels=labels,
        autocast=frozenset(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)),
        on_plan=_with_library_bytes(on_plan, devices),
    )
    return drop_unused_gradients(
        capture(module, example_inputs, compilation, labels, may_run_eagerly=pipelining is None)
    )


def _touched_devices(inputs: Sequence[Any]) -> list[torch.device]:
    """CUDA devices of the inputs, where libraries have allocated by now what they keep for the threads of a step."""
    devices = _cuda_devices(inputs)
    for device in devices:
        stream = torch.accelerator.current_stream(device)
        touch_libraries(stream)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            touch_libraries_in_backward(stream)
    return devices


def _cuda_devices(inputs: Sequence[Any]) -> list[torch.device]:
    if not torch.cuda.is_initialized():
        return []
    tensors = (value for value in inputs if isinstance(value, torch.Tensor) and value.device.type == "cuda")
    return [*dict.fromkeys(tensor.device for tensor in tensors)]


def _with_library_bytes(on_plan: Callable[[Plan], None], devices: Sequence[torch.device]) -> Callable[[Plan], None]:
    """``on_plan`` for plans that tell what libraries keep on the devices by then."""

    def tell(plan: Plan) -> None:
        kept = sum(map(library_bytes, dict.fromkeys(devices)))
        on_plan(dataclasses.replace(plan, library_bytes=kept) if kept else plan)

    return tell


def _shapes(inputs: Sequence[Any]) -> str:
    """A text that distinguishes graphs which differ only in the sizes of their inputs."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    kinds = [(str(tuple(value.shape)), str(value.dtype), value.requires_grad) for value in tensors]
    modes = torch.is_grad_enabled()
    return hashlib.sha256(f"{kinds} {modes}".encode()).hexdigest()[:8]


def _operations_name(module: fx.GraphModule) -> str:
    """A name that graphs of the same operations share, whatever their sizes, symbolic ones included.

    Which outputs a step differentiates is learned with one batch and holds for others.
    """
    sizes = (int, torch.SymInt, torch.Size)
    targets = [
        node.target if isinstance(node.target, str) else getattr(node.target, "__qualname__", str(node.target))
        for node in module.graph.nodes
        if node.op.startswith("call") and not isinstance(node.meta.get("example_value"), sizes)
    ]
    return hashlib.sha256(" ".join(targets).encode()).hexdigest()[:8]


def _stand_in(node: Any) -> Any:
    """Passed to autograd in place of a value that the pipeline keeps itself."""
    if not isinstance(node, fx.Node):
        return 0
    if torch_private.is_opaque(node.meta.get("val")):  # AOTAutograd keeps such objects apart
        return torch_private.opaque_object(node.meta["val"])
    return torch.empty(0) if is_tensor(node) else 0


def _never_called(arguments: list[Any]) -> Any:
    raise RuntimeError(
        "a tensor was differentiated that the forward of a pipelined model keeps somewhere and does not return: the "
        "backward of a pipeline runs for what the model returns. Return it with the output; or add it to the loss "
        "inside the model, or in the loss_fn of forward_backward."
    )


_never_called._boxed_call = True  # type: ignore[attr-defined]
