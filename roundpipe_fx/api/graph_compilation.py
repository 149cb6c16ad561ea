"""AOTAutograd's callbacks for one graph, as far as they are the same on one device and in a pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import fx

from roundpipe_fx import torch_private
from roundpipe_fx.analysis.outside_loss import expect_loss
from roundpipe_fx.api.learned import Learned
from roundpipe_fx.budget import Result
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.frontend.capture import is_outermost, joint_graph_of
from roundpipe_fx.frontend.invalid_backward import warn_of_redrawn_numbers
from roundpipe_fx.frontend.opaque_backward import OpaqueCall
from roundpipe_fx.frontend.size_range import lower_for_sizes
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.options import Options
from roundpipe_fx.ir.text import joint_text
from roundpipe_fx.planner.lower import is_bounded_in_bytes
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.runtime.stage_compiler import Boxed

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(kw_only=True)
class GraphCompilation:
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
        """Plan a step and return what autograd is to call, as forward and backward graphs."""
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
        """Return what runs a graph that computes no gradients."""
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
