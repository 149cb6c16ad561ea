"""A joint graph that was lowered to programs, and what is derived from them: its peak, a call's footprint.

The programs are followed once, as a course of allocations and frees, and all bytes are read from that::

    forward, backward ── follow_programs ──▶ course ─┬─ find_course_peak ─────────▶ call_peak, lasting_peak
                                                     └─ compute_course_footprint ─▶ footprint
    footprint, needs of the step's other calls ── StepNeeds.peak ─────────────────▶ peak

On CUDA a peak depends on blocks that the caching allocator holds already: it is the largest of several histories.
``call_peak`` counts those that the device has now as well; ``lasting_peak`` does not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from roundpipe_fx.analysis.allocator_histories import find_histories
from roundpipe_fx.analysis.caching_allocator import CachingAllocator, History
from roundpipe_fx.analysis.outside_loss import returned_view_bytes
from roundpipe_fx.analysis.program_events import Course, Follow, FollowedModule, follow_events
from roundpipe_fx.analysis.simulator import allocation_granularity, compute_course_footprint, find_course_peak
from roundpipe_fx.analysis.step_of_calls import Footprint
from roundpipe_fx.codegen import Program, StageModule
from roundpipe_fx.compiler.plan_cache import CachedReport
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.collectives import starts_collective
from roundpipe_fx.ir.decisions import PeakMoment
from roundpipe_fx.ir.joint_graph import JointGraph, Phase, tensor_values
from roundpipe_fx.ir.options import StageCompiler
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.remat.choose import Chosen


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A joint graph that was lowered to programs.

    Attributes:
        joint: the graph, with every decision explicit.
        setting: what emission knew besides the graph.
        chosen: the planner's result; ``None``: a save policy decided.
        forward: the program that runs the forward.
        backward: the program that runs the backward; ``None`` for an inference graph.
        seconds: modelled, by stage and phase.
        recompute_seconds: modelled seconds of recomputation.
        tangents: the incoming gradients that a step is expected to pass; others are an expanded scalar zero.
        sizes: the largest sizes that it holds for, by input and dimension, before they are guarded: a guard makes a
            constant of a size that may only be what it is.
        assumed: sizes that depend on data, by symbol.
        follow: follows stage modules by the code that their compiler writes; ``None``: as operations run one by one.
    """

    joint: JointGraph
    setting: Setting
    chosen: Chosen | CachedReport | None
    modules: Mapping[tuple[int, Phase], StageModule]
    forward: Program
    backward: Program | None
    seconds: Mapping[tuple[int, Phase], float]
    recompute_seconds: float
    tangents: Collection[fx.Node]
    sizes: Mapping[str, int]
    assumed: Mapping[str, int]
    follow: Follow | None = None

    @property
    def stage_compiler(self) -> StageCompiler:
        """The compiler that runs the stage modules."""
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
        """Return whether no size of an incoming gradient is symbolic."""
        values = [value for node in self.joint.tangents for value in tensor_values(node)]
        return all(isinstance(size, int) for value in values for size in value.shape)

    @functools.cached_property
    def is_tiled(self) -> bool:
        """Return whether some operations run in tiles."""
        return any(isinstance(node.target, TileLoop) for node in self.joint.computed())

    @functools.cached_property
    def is_tight(self) -> bool:
        """Test for a plan that would be another one with more memory."""
        return self.recompute_seconds > 0 or self.is_tiled or bool(self.setting.context.host_copies)

    @functools.cached_property
    def runs_in_order(self) -> bool:
        """Test that nothing reads a value beside the stage module that reads it last: no other stream, no copy to the
        host, no collective."""
        programs = [program.module.graph for program in (self.forward, self.backward) if program is not None]
        fork = torch.ops.streams.fork.default
        forks = any(graph.find_nodes(op="call_function", target=fork) for graph in programs)
        communicates = any(starts_collective(node.target) for node in self.joint.graph.nodes)
        return not forks and not communicates and not self.setting.context.host_copies

    @functools.cached_property
    def parameters(self) -> frozenset[int]:
        """Numbers of the inputs that are parameters or buffers."""
        return frozenset(position for position, node in enumerate(self.forward.inputs) if node in self.joint.parameters)

    def judge_by(self, follow: Follow) -> Lowered:
        """Return a copy whose peak is that of the code that the stage compiler writes."""
        return dataclasses.replace(self, follow=follow if self.runs_in_order else without_donation(follow))

    @functools.cached_property
    def _course(self) -> Course:
        """Allocations and frees of the programs in a step of one call."""
        joint, device = self.joint, self.setting.device
        return follow_programs(joint, self.forward, self.backward, self.tangents, device, self.follow)

    @functools.cached_property
    def call_peak(self) -> PeakMoment:
        """The predicted peak of a step with this call alone, after the worst history of the allocator."""
        # The allocator's history is not known when a plan is made: the worst of several counts.
        now = map(self._peak_after, self.setting.histories)
        return max((self._lasting_peak, *now), key=lambda peak: peak.bytes)

    @property
    def lasting_peak(self) -> int:
        """Bytes of the peak of one call, whatever blocks the device has now."""
        return self._lasting_peak.bytes

    @functools.cached_property
    def _lasting_peak(self) -> PeakMoment:
        exact = find_course_peak(self._course)
        peaks = [self._peak_after(history) for history in find_histories(self.setting.device, exact.bytes)]
        return max(peaks, key=lambda peak: peak.bytes, default=exact)

    def _peak_after(self, history: History) -> PeakMoment:
        return find_course_peak(self._course, CachingAllocator(), find_trained_inputs(self.joint), history)

    @functools.cached_property
    def footprint(self) -> Footprint:
        """The memory footprint of one call."""
        # The allocator's rounding is no part of the footprint's events: the difference is added as a whole.
        beyond = max(self.call_peak.bytes - find_course_peak(self._course).bytes, 0)
        return compute_course_footprint(self._course, self.gradient_owners, beyond)


def follow_programs(
    joint: JointGraph,
    forward: Program,
    backward: Program | None,
    tangents: Collection[fx.Node],
    device: torch.device,
    follow: Follow | None = None,
) -> Course:
    """Follow a step of one call.

    Args:
        joint: the graph that was emitted.
        backward: its backward program, if it has one.
        tangents: the incoming gradients that a step is expected to pass.
        device: the device that was compiled for.
    """
    granularity = allocation_granularity(device)
    outside = returned_view_bytes(joint, granularity)
    released = [*joint.updates, *sorted(joint.dropped)]
    return follow_events(forward, backward, tangents, granularity, released=released, outside=outside, follow=follow)


def without_donation(follow: Follow) -> Follow:
    """Wrap a follower so that stages overwrite no input."""

    def follow_call(
        call: StageModule, storages: Sequence[Sequence[int]], dying: Collection[int]
    ) -> FollowedModule | None:
        return follow(call, storages, ())

    return follow_call


def find_trained_inputs(joint: JointGraph) -> list[int]:
    """Find the numbers of the inputs that get gradients."""
    return sorted({owner for owner in joint.gradient_owners if owner is not None})
