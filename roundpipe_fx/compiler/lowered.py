"""A joint graph that was lowered to programs, and what is derived from them: the plan, its peak, a call's footprint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from roundpipe_fx.analysis.allocator_histories import histories_of
from roundpipe_fx.analysis.caching_allocator import CachingAllocator, History
from roundpipe_fx.analysis.memory_timeline import memory_timeline
from roundpipe_fx.analysis.outside_loss import returned_view_bytes
from roundpipe_fx.analysis.program_events import Course, course_of
from roundpipe_fx.analysis.simulator import (
    PeakMoment,
    allocation_granularity,
    footprint_of_course,
    peak_of_course,
    worst_history,
)
from roundpipe_fx.analysis.step_of_calls import Footprint
from roundpipe_fx.codegen import Program, StageModule, own_nodes
from roundpipe_fx.compiler.make_plan import make_plan
from roundpipe_fx.compiler.plan_cache import Recalled
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph, Phase, tensor_values
from roundpipe_fx.ir.options import StageCompiler
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.remat.choose import Chosen
from roundpipe_fx.report.emitted_lines import emitted_lines
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.report.plan_details import EmittedStep

__all__ = ["Lowered"]


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A joint graph that was lowered to programs.

    Attributes:
        joint: the graph, with every decision explicit.
        setting: what emission knew besides the graph.
        chosen: the planner's result; ``None``: a save policy decided.
        modules: the stage modules.
        forward: the program that runs the forward.
        backward: the program that runs the backward; ``None`` for an inference graph.
        seconds: modelled, by stage and phase.
        recompute_seconds: modelled seconds of recomputation.
        tangents: the incoming gradients that a step is expected to pass; others are an expanded scalar zero.
    """

    joint: JointGraph
    setting: Setting
    chosen: Chosen | Recalled | None
    modules: Mapping[tuple[int, Phase], StageModule]
    forward: Program
    backward: Program | None
    seconds: Mapping[tuple[int, Phase], float]
    recompute_seconds: float
    tangents: Collection[fx.Node]

    @property
    def stage_compiler(self) -> StageCompiler:
        """What runs the stage modules."""
        return self.setting.compiler

    @property
    def gradient_owners(self) -> Sequence[int | None]:
        """For each of the backward's results, the number of the input whose gradient it is, or a part of, if any."""
        return self.joint.gradient_owners

    @property
    def updates(self) -> Mapping[int, int]:
        """Inputs that the caller updates in place, by number of the result with the new value."""
        return self.joint.updates

    @property
    def budget(self) -> int | None:
        """Bytes that were planned for; ``None``: no number."""
        return self.chosen.limit if self.chosen is not None else None

    @functools.cached_property
    def peak(self) -> PeakMoment:
        """The predicted peak of a step."""
        step = self.setting.step
        return self.call_peak if step is None else dataclasses.replace(self.call_peak, bytes=step.peak(self.footprint))

    @functools.cached_property
    def static(self) -> bool:
        """Whether no size of an incoming gradient is symbolic."""
        values = [value for node in self.joint.tangents for value in tensor_values(node)]
        return all(isinstance(size, int) for value in values for size in value.shape)

    @property
    def is_tiled(self) -> bool:
        """Whether some operations run in tiles."""
        return any(isinstance(node.target, TileLoop) for node in self.joint.computed())

    @functools.cached_property
    def parameters(self) -> frozenset[int]:
        """Numbers of the inputs that are parameters or buffers."""
        return frozenset(place for place, node in enumerate(self.forward.inputs) if node in self.joint.parameters)

    @functools.cached_property
    def plan(self) -> Plan:
        """The report of all decisions, which nothing but reports reads. It is made on first access, since most graphs
        that are lowered are only tried."""
        joint, setting = self.joint, self.setting
        return make_plan(
            joint,
            modules=self.modules,
            forward=self.forward,
            backward=self.backward,
            recompute=setting.options.recompute or "none",
            peak=self.peak,
            chosen=self.chosen,
            beyond_plan=setting.beyond_plan,
            on_host=tuple(copy.value for copy in setting.context.host_copies),
            alive=setting.step.alive if setting.step is not None else 1,
            # Of what is needed for it, so that the plan does not keep the planner's result.
            read_step=functools.partial(
                _emitted_step,
                joint,
                self.modules,
                self.forward,
                self.backward,
                self.tangents,
                setting.device,
                setting.histories,
            ),
            read_in_tiles=setting.read_in_tiles,
        )

    @functools.cached_property
    def _course(self) -> Course:
        return _course(self.joint, self.forward, self.backward, self.tangents, self.setting.device)

    @functools.cached_property
    def call_peak(self) -> PeakMoment:
        """The predicted peak of a step with this call alone, after the worst history of the allocator."""
        now = map(self._peak_after, self.setting.histories)
        return max((self._lasting_peak, *now), key=lambda peak: peak.bytes)

    @property
    def lasting_peak(self) -> int:
        """Bytes of the peak of one call, whatever blocks the device has now."""
        return self._lasting_peak.bytes

    @functools.cached_property
    def _lasting_peak(self) -> PeakMoment:
        exact = peak_of_course(self._course)
        peaks = [self._peak_after(history) for history in histories_of(self.setting.device, exact.bytes)]
        return max(peaks, key=lambda peak: peak.bytes, default=exact)

    def _peak_after(self, history: History) -> PeakMoment:
        return peak_of_course(self._course, CachingAllocator(), _trained(self.joint), history)

    @functools.cached_property
    def footprint(self) -> Footprint:
        """The memory footprint of one call."""
        beyond = max(self.call_peak.bytes - peak_of_course(self._course).bytes, 0)
        return footprint_of_course(self._course, self.gradient_owners, beyond)


def _course(
    joint: JointGraph, forward: Program, backward: Program | None, tangents: Collection[fx.Node], device: torch.device
) -> Course:
    granularity = allocation_granularity(device)
    outside = returned_view_bytes(joint, granularity)
    return course_of(forward, backward, tangents, granularity, updates=joint.updates, outside=outside)


def _trained(joint: JointGraph) -> list[int]:
    return sorted({owner for owner in joint.gradient_owners if owner is not None})


def _emitted_step(
    joint: JointGraph,
    modules: Mapping[tuple[int, Phase], StageModule],
    forward: Program,
    backward: Program | None,
    tangents: Collection[fx.Node],
    device: torch.device,
    now: Sequence[History],
) -> EmittedStep:
    """What is read off the programs when somebody looks at the plan."""
    nodes = own_nodes(joint, modules)
    course = _course(joint, forward, backward, tangents, device)
    histories = *histories_of(device, peak_of_course(course).bytes), *now
    memory = memory_timeline(course, nodes)
    if histories:
        trained = _trained(joint)
        worst = worst_history(course, histories, trained)
        memory = memory_timeline(course, nodes, CachingAllocator(), trained, worst)
    return EmittedStep(
        memory=memory,
        lines=emitted_lines(modules.values(), nodes),
    )
