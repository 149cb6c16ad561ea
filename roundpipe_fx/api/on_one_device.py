"""AOTAutograd's callbacks for a graph whose programs its runtime calls, and what their steps show."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from roundpipe_fx import torch_private
from roundpipe_fx.analysis.cost import COMPILED_STAGES
from roundpipe_fx.analysis.outside_loss import lasting_bytes, returned_view_bytes
from roundpipe_fx.analysis.simulator import allocation_granularity
from roundpipe_fx.analysis.step_of_calls import StepNeeds
from roundpipe_fx.api.callers_outputs import CallersOutputs
from roundpipe_fx.api.graph_compilation import GraphCompilation
from roundpipe_fx.api.initial_split_budget import lower_as_one_of
from roundpipe_fx.budget import Infeasible, Result, plan_or_error
from roundpipe_fx.codegen import Program
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, is_tensor
from roundpipe_fx.ir.options import Options
from roundpipe_fx.ir.text import joint_text
from roundpipe_fx.planner.lower import lower, requested_budget
from roundpipe_fx.report.make_plan import plan_of, with_dropped_outputs
from roundpipe_fx.report.out_of_memory_text import planned_memory
from roundpipe_fx.runtime.bridge import respect_trace_only
from roundpipe_fx.runtime.dropped_outputs import DroppedOutputs
from roundpipe_fx.runtime.executor import load_program
from roundpipe_fx.runtime.incoming_gradients import (
    fill_missing_gradients,
    observe_unexpected_gradients,
    record_outputs,
)
from roundpipe_fx.runtime.observers import size_observer
from roundpipe_fx.runtime.profiled_step import ProfiledStep
from roundpipe_fx.runtime.stage_compiler import Boxed, compile_stages
from roundpipe_fx.runtime.step_calls import NotedGraph
from roundpipe_fx.runtime.unread_outputs import UnreadOutputs


@dataclass(kw_only=True)
class OnOneDevice(GraphCompilation):
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
        """Return the forward program, with what observes its calls."""
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
        """Return the backward program, with what observes its calls."""
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
