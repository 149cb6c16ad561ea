"""The caller's outputs: which of a graph's outputs a plan assumes dropped before the backward, and what steps show.

::

    no step has run      held; where the budget cannot be met so, dropped; where it cannot be met so either, unread
    a step dropped them  unread, in the next plan if it can recompute less then; else the same programs need less
    a step read them     dropped, in all later plans
    a step held them     held, in this and all later plans
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from roundpipe_fx.analysis.outside_loss import output_bytes
from roundpipe_fx.api.learned import Learned
from roundpipe_fx.budget import Infeasible, bytes_text
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.ir.joint_graph import JointGraph, viewed
from roundpipe_fx.ir.options import Options
from roundpipe_fx.planner.lower import is_bounded_in_bytes
from roundpipe_fx.runtime.dropped_outputs import DroppedOutputs
from roundpipe_fx.runtime.unread_outputs import UnreadOutputs

_WORTH_PLANNING = 0.01
"""A step is planned anew for outputs that are dropped if they have more than so much of the budget."""


@dataclass(frozen=True, kw_only=True)
class PlannedOutputs:
    """A plan, as far as the caller's outputs matter to it.

    Attributes:
        joint: the graph, with the outputs that are assumed dropped or unread.
        calls: how many of the graph's calls a step has together, as those of microbatches.
        budget: bytes that the step may take; ``None``: there is no limit.
        read_tight: returns whether the plan would be another one with more memory.
        read_peak: returns the bytes that the step takes.
        correct: reports the same plan with other outputs, by number, dropped.
    """

    joint: JointGraph
    calls: int = 1
    budget: int | None
    read_tight: Callable[[], bool]
    read_peak: Callable[[], int]
    correct: Callable[[frozenset[int]], None] = lambda _: None

    def bytes_of(self, outputs: Iterable[int]) -> int:
        """Bytes of outputs, by number, as the caller sees them."""
        return self.calls * output_bytes(self.joint, outputs)


class CallersOutputs:
    """Outputs of a graph that its caller may drop before the backward begins, by number.

    Args:
        graph: name under which steps of the graph are learned from.
        learned: what steps have shown; extended.
    """

    def __init__(self, graph: str, joint: JointGraph, options: Options, learned: Learned) -> None:
        self._graph, self._options, self._learned = graph, options, learned
        self._droppable = joint.droppable - learned.held(graph)
        self._held = joint.droppable & learned.held(graph)
        self._reported: frozenset[int] = frozenset()
        # Of a share of what can be reached, both ends are less, and the plan is mostly the same.
        self._is_bounded = options.memory_budget == 0.0 or is_bounded_in_bytes(joint, options)

    @property
    def assumed_dropped(self) -> frozenset[int]:
        """Outputs that the next plan assumes dropped."""
        return self._droppable & (
            self._droppable if self._options.outputs in ("dropped", "unread") else self._learned.dropped(self._graph)
        )

    @property
    def assumed_unread(self) -> frozenset[int]:
        """Outputs that the next plan assumes dropped without having been read."""
        unread = {"auto": self._learned.dropped(self._graph), "unread": self._droppable}
        return self._droppable & unread.get(self._options.outputs, frozenset()) - self._learned.read(self._graph)

    @property
    def unread_if_needed(self) -> frozenset[int]:
        """Outputs that the next plan assumes so where the budget cannot be met otherwise."""
        return self.assumed_if_needed - self._learned.read(self._graph)

    @property
    def assumed_if_needed(self) -> frozenset[int]:
        """Outputs that the next plan assumes dropped where the budget cannot be met otherwise."""
        return self._droppable if self._options.outputs == "auto" else frozenset()

    def explain(self, refusal: Infeasible[str], joint: JointGraph) -> Infeasible[str]:
        """Name the outputs that a step has held or read, where that may be why a budget is refused."""
        read = self._droppable & self._learned.read(self._graph)
        hints = ""
        if self._held:
            size = output_bytes(joint, self._held)
            hints += (
                f" The caller holds {size} bytes ({bytes_text(size)}) of outputs until the backward is over: take the "
                "loss alone (loss = model(**batch).loss), or delete the outputs before loss.backward()."
            )
        if read:
            size = output_bytes(joint, read)
            hints += (
                f" The caller reads {size} bytes ({bytes_text(size)}) of outputs before the backward: where they are "
                "dropped unread, they need not be computed as a whole."
            )
        return dataclasses.replace(refusal, bottleneck=refusal.bottleneck + hints)

    def observe(self, lowered: Lowered, correct: Callable[[Lowered], None]) -> DroppedOutputs | None:
        """Observe the steps of a plan.

        Args:
            lowered: the programs that run.
            correct: told of the same programs, with the outputs that were dropped, if only what they need is less.

        Returns:
            what wraps the programs; ``None``: there is nothing to see.
        """
        assert lowered.backward is not None
        self._reported = lowered.joint.dropped
        if not self._droppable or self._options.outputs == "held":
            return None
        read = {viewed(node): position for position, node in enumerate(lowered.backward.inputs)}
        results = {position: viewed(lowered.forward.results[position]) for position in self._droppable}
        saved = {position: read[node] for position, node in results.items() if node in read}
        planned = _planned(lowered, correct)
        return DroppedOutputs(self._droppable, saved, lambda held: self._see(held, planned))

    def leave_unread(self, lowered: Lowered) -> UnreadOutputs | None:
        """Return what wraps the programs of a plan that assumes outputs unread; ``None``: it assumes none."""
        unread = lowered.joint.unread
        return UnreadOutputs(unread, functools.partial(self.see_read, _planned(lowered))) if unread else None

    def see_read(self, planned: PlannedOutputs, position: int) -> None:
        """Note an output, by number, that was assumed unread and is read."""
        self._learned.see_read(self._graph, position)
        if planned.budget is not None:
            size = planned.bytes_of([position])
            self._learned.steps.warn_of_read(size, planned.read_peak(), planned.budget)

    def see_dropped(self, planned: PlannedOutputs, dropped: frozenset[int]) -> None:
        """Note the outputs that a pipeline's caller no longer holds when the backward begins."""
        self._see(self._droppable - dropped, planned)

    def _see(self, held: frozenset[int], planned: PlannedOutputs) -> None:
        """Note the outputs that a step holds when its backward begins."""
        learned, joint, budget = self._learned, planned.joint, planned.budget
        wrong = joint.dropped & held
        learned.note_held(self._graph, (self._droppable & held) - wrong)
        self._droppable -= held
        if wrong and budget is not None:
            learned.see_held(self._graph, wrong)
            learned.steps.warn_of_held(planned.bytes_of(wrong), planned.read_peak(), budget)
            return
        gained = planned.bytes_of(self._droppable - joint.dropped)
        may_replan = self._is_bounded and learned.steps.replans and planned.read_tight()
        if may_replan and budget is not None and gained > _WORTH_PLANNING * budget:
            learned.see_dropped(self._graph, self._droppable)
        elif self._droppable != self._reported:
            self._reported = self._droppable
            planned.correct(self._droppable)


def _planned(lowered: Lowered, correct: Callable[[Lowered], None] = lambda _: None) -> PlannedOutputs:
    """Gather what is planned for the outputs of a graph whose programs run on one device."""

    def correct_for(dropped: frozenset[int]) -> None:
        correct(dataclasses.replace(lowered, joint=dataclasses.replace(lowered.joint, dropped=dropped)))

    return PlannedOutputs(
        joint=lowered.joint,
        budget=lowered.budget,
        read_tight=lambda: lowered.is_tight,
        read_peak=lambda: lowered.peak.bytes,
        correct=correct_for,
    )
