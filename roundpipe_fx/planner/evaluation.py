"""Candidates, and their evaluation: decisions as plain data, and the bytes and seconds of a step that follows them.

The search (:mod:`roundpipe_fx.planner.search`) evaluates candidates of two kinds: for programs on one device
(:mod:`roundpipe_fx.planner.program_within_budget`), and for schedules on several
(:mod:`roundpipe_fx.planner.schedule_within_budget`). Both emit what was decided and simulate that.

One engine follows memory, from events that make, read and free storages (:mod:`roundpipe_fx.analysis.liveness`)::

    while a plan is searched for   the operations of a graph, in the order tried   roundpipe_fx.remat.schedule
    of what is emitted             the operations of its programs                  roundpipe_fx.analysis.program_events
    of a schedule's devices        the peaks of stage calls, from the same         roundpipe_fx.schedules.memory, which
                                   events; actions in each device's order          adds what lives between them
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from roundpipe_fx.budget import Found
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline
from roundpipe_fx.remat.choose import Chosen, Unmet
from roundpipe_fx.remat.options_on_host import HostTier
from roundpipe_fx.remat.save_policy import SavePolicy
from roundpipe_fx.schedules import Timing
from roundpipe_fx.schedules.choose_offloads import OffloadRule

T = TypeVar("T", bound=Lowered | LoweredPipeline, covariant=True)
E = TypeVar("E", bound="Evaluation[Lowered | LoweredPipeline]")


@dataclass(frozen=True, eq=False)
class Candidate:
    """Decisions about a graph whose tiles and stages are given.

    Attributes:
        saved: what is saved, and what is recomputed when: a schedule that was searched for, or a policy.
        sent: which values leave for the host though the user has not asked for it. Of a program: those whose copies are
            hidden, up to so many bytes. Of a schedule: those that a rule takes; ``None``: none.
    """

    saved: Chosen | SavePolicy
    sent: int | OffloadRule | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation(Generic[T]):
    """A candidate that was emitted and simulated.

    Attributes:
        emitted: the programs, or the pipeline.
        peaks: bytes of each device.
        seconds: modelled, of a step.
        recompute_seconds: modelled, of recomputation for a microbatch.
    """

    candidate: Candidate
    emitted: T
    peaks: tuple[int, ...]
    seconds: float
    recompute_seconds: float

    @property
    def peak(self) -> int:
        """Bytes of the device that needs most."""
        return max(self.peaks)


@dataclass(frozen=True, eq=False, kw_only=True)
class ScheduleEvaluation(Evaluation[LoweredPipeline]):
    """A candidate whose schedule was simulated.

    Attributes:
        emit: emits the same once more, with stage modules of its own. To be simulated, an evaluation takes those of
            others that do the same, in which values have other names. ``None``: it has its own.
    """

    timing: Timing
    emit: Callable[[], Lowered] | None = None


def evaluate_schedule(
    candidate: Candidate, plan: LoweredPipeline, emit: Callable[[], Lowered] | None = None
) -> ScheduleEvaluation:
    """Simulate the schedule of a pipeline.

    Args:
        candidate: the decisions that it follows.
    """
    timing = plan.predict(plan.pipelining.microbatches)
    return ScheduleEvaluation(
        candidate=candidate,
        emitted=plan,
        peaks=tuple(timing.peak_bytes),
        seconds=timing.makespan,
        recompute_seconds=plan.main.lowered.recompute_seconds,
        timing=timing,
        emit=emit,
    )


def with_timing(evaluation: ScheduleEvaluation, plan: LoweredPipeline, timing: Timing) -> ScheduleEvaluation:
    """The evaluation of a plan that only differs in when what runs, or in what leaves for the host.

    Args:
        evaluation: of the other plan.
    """
    peaks = tuple(timing.peak_bytes)
    return dataclasses.replace(evaluation, emitted=plan, timing=timing, peaks=peaks, seconds=timing.makespan)


def find_quickest(evaluations: Iterable[E], limit: int) -> E | None:
    """Find the evaluation with the shortest step within a limit; ties go to less recomputation, then to fewer bytes.

    Args:
        limit: bytes of a device.
    """
    within = [evaluation for evaluation in evaluations if evaluation.peak <= limit]
    return min(within, key=lambda one: (one.seconds, one.recompute_seconds, one.peak), default=None)


@dataclass(frozen=True, kw_only=True)
class Space(Generic[E]):
    """Programs, or schedules, as the search for tiles sees them.

    Attributes:
        planned: evaluates the best plan for a graph within a budget (bytes or a share); the last argument is a limit:
            where one operation alone needs more bytes, no plan is searched for; ``None``: one always is.
        widest_first: whether the widest regions are tiled first, since it is not known which values are alive at the
            peak. Otherwise those are that hold most of it.
        tier: the host for the values of an annotated graph; ``None``: none leave.
        runs: of the graph in a step on its only device; ``None``: several devices share a step.
    """

    planned: Callable[[JointGraph, Setting, int | float, int | None], Found[E] | Unmet]
    widest_first: bool = False
    tier: Callable[[JointGraph, Setting], HostTier | None] = lambda joint, setting: None
    runs: int | None = 1
