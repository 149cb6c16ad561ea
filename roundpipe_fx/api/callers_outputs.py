"""The caller's outputs: which of a graph's outputs a plan assumes dropped before the backward, and what steps show.

::

    no step has run      held; where the budget cannot be met so, dropped; where it cannot be met so either, unread
    a step dropped them  unread, in the next plan if it can recompute less then; else the same programs need less
    a step read them     dropped, in all later plans
    a step held them     held, in this and all later plans
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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
        return DroppedOutputs(self._droppable, saved, lambda held: self._see(held, lowered, correct))

    def leave_unread(self, lowered: Lowered) -> UnreadOutputs | None:
        """Return what wraps the programs of a plan that assumes outputs unread; ``None``: it assumes none."""

        def see(position: int) -> None:
            self._learned.see_read(self._graph, position)
            if lowered.budget is not None:
                size = output_bytes(lowered.joint, [position])
                self._learned.steps.warn_of_read(size, lowered.peak.bytes, lowered.budget)

        unread = lowered.joint.unread
        return UnreadOutputs(unread, see) if unread else None

    def _see(self, held: frozenset[int], lowered: Lowered, correct: Callable[[Lowered], None]) -> None:
        """Note the outputs that a step holds when its backward begins."""
        learned, joint, budget = self._learned, lowered.joint, lowered.budget
        wrong = joint.dropped & held
        learned.note_held(self._graph, (self._droppable & held) - wrong)
        self._droppable -= held
        if wrong and budget is not None:
            learned.see_held(self._graph, wrong)
            learned.steps.warn_of_held(output_bytes(joint, wrong), lowered.peak.bytes, budget)
            return
        gained = output_bytes(joint, self._droppable - joint.dropped)
        may_replan = self._is_bounded and learned.steps.replans and lowered.is_tight
        if may_replan and budget is not None and gained > _WORTH_PLANNING * budget:
            learned.see_dropped(self._graph, self._droppable)
        elif self._droppable != self._reported:
            self._reported = self._droppable
            correct(dataclasses.replace(lowered, joint=dataclasses.replace(joint, dropped=self._droppable)))
