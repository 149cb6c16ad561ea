"""AOTAutograd's callbacks for a graph whose stages a pipeline runs, forward and backward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from roundpipe_fx import torch_private
from roundpipe_fx.api.callers_outputs import CallersOutputs, PlannedOutputs
from roundpipe_fx.api.graph_compilation import GraphCompilation
from roundpipe_fx.budget import Found, Infeasible, Result, plan_or_error
from roundpipe_fx.codegen import seen_by_autograd
from roundpipe_fx.compiler.emit import device_of
from roundpipe_fx.ir.joint_graph import JointGraph, is_tensor
from roundpipe_fx.ir.options import Options
from roundpipe_fx.ir.text import joint_text
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline
from roundpipe_fx.pipeline.pipelined_graph import (
    UNOBSERVED,
    OutputObservers,
    PipelinedGraph,
    StepObservers,
    compile_pipelined_graph,
)
from roundpipe_fx.pipeline.settings import Pipelining, StepSetting
from roundpipe_fx.planner.lower import requested_budget
from roundpipe_fx.planner.lower_pipeline import lower_pipeline
from roundpipe_fx.report.pipeline_plan import plan_of_pipeline
from roundpipe_fx.runtime.bridge import make_pipelined_forward
from roundpipe_fx.runtime.stage_compiler import Boxed
from roundpipe_fx.schedules import Timing


@dataclass(kw_only=True)
class InPipeline(GraphCompilation):
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
        if not self._may_leave_unread or self.options.outputs == "held":
            return UNOBSERVED
        lowered = pipeline.main.lowered

        @functools.cache
        def predict() -> Timing:
            return pipeline.predict(self.pipelining.microbatches)

        planned = PlannedOutputs(
            joint=lowered.joint,
            calls=self.pipelining.microbatches,
            budget=pipeline.budget,
            read_tight=lambda: lowered.is_tight or bool(predict().offloads),
            read_peak=lambda: max(predict().peak_bytes),
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
        """Return what gives autograd the results of the pipeline's forward."""
        kept = self.lowered.forward.results[self.lowered.forward.outputs :]
        return make_pipelined_forward(self.graph, [_stand_in(node) for node in kept])

    def backward(self, _module: fx.GraphModule, _inputs: Sequence[Any]) -> Boxed:
        """Return what autograd never calls: the pipeline runs its backward."""
        return _never_called

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
