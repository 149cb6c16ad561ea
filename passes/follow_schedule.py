"""follow_schedule: the backward as a plan has worked it out, as explicit nodes in the planned order.

A schedule lists, segment by segment, the operations of the backward and the forward operations that run again right
before they are needed. Here each repetition becomes a copy of its node, every reader reads the latest copy of what it
needs, and the graph is put into the schedule's order. What no step makes again is kept from the forward.

Views cost nothing and are no steps: they are made where they are read, from whatever copy of their base is the latest
there, so that none holds a storage longer than the schedule says.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from torch import fx

from roundpipe_fx.analysis.cost import CostModel, annotate_node
from roundpipe_fx.analysis.operations import Step
from roundpipe_fx.analysis.recomputation import Form, Snapshots, repetition
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    has_side_effect,
    input_nodes,
    is_symbolic_scalar,
    is_view,
)
from roundpipe_fx.ir.segment import StageCut

__all__ = ["follow_schedule"]


def follow_schedule(
    joint: JointGraph, blocks: Iterable[tuple[int, Sequence[Step]]], cuts: Iterable[StageCut], costs: CostModel
) -> JointGraph:
    """Rewrite the backward as scheduled.

    Args:
        joint: a graph with stages.
        blocks: the steps of each segment's backward, last segment first.
        cuts: the stages, in the order in which they run: of several that have a segment its backward is in the last one
            (RoundPipe's slots). A segment may have no backward of its own and make values for others again.
        costs: cost model for the nodes that are added.

    Returns:
        the graph, its backward in the order of the schedule, with repetitions as nodes of phase backward in the stage
        whose backward they run in.
    """
    stage_of = {segment: cut.index for cut in cuts for segment in range(cut.first, cut.last + 1)}
    follower = _Follower(joint, costs)
    for segment, steps in blocks:
        follower.begin(segment, stage_of[segment])
        for step in steps:
            follower.run(step)
        follower.end()
    follower.finish()
    return joint


class _Follower:
    """Places nodes at the end of the graph, one after another."""

    def __init__(self, joint: JointGraph, costs: CostModel) -> None:
        self._joint = joint
        self._costs = costs
        self._snapshots = Snapshots(joint, costs)
        self._output = joint.graph.output_node()
        self._segment = self._stage = 0
        self._latest: dict[fx.Node, fx.Node] = {}
        """By forward node, the copy that readers get from here on."""
        self._made: dict[tuple[fx.Node, int, tuple[fx.Node, ...]], fx.Node] = {}
        """Views by what they are of, the stage they are made in, and what they read there."""
        self._placed: set[fx.Node] = set()
        self._rest: dict[int, list[fx.Node]] = {}
        for node in joint.in_phase(Phase.BACKWARD):
            if is_view(node) or has_side_effect(node):
                self._rest.setdefault(node.meta[Mark.SEGMENT], []).append(node)

    def begin(self, segment: int, stage: int) -> None:
        """The backward of a segment begins."""
        self._segment, self._stage = segment, stage

    def end(self) -> None:
        """The backward of a segment ends: views that only the caller reads are made."""
        for node in self._rest.get(self._segment, ()):
            if node not in self._placed and (self._output in node.users or has_side_effect(node)):
                self._resolve(node)

    def run(self, step: Step) -> None:
        """Place one step."""
        if step.way is None:
            node = step.operation.node
            self._read(node)
            self._place(node)
            self._take_apart(node, node)
            return
        original = step.way.node
        copy = repetition(self._joint, original, step.way.form, self._output)
        copy.meta[Mark.PHASE] = Phase.BACKWARD
        if step.stand_in is not None:
            copy.update_arg(0, step.stand_in)
        self._read(copy)
        self._place(copy)  # behind the views that it reads
        annotate_node(copy, self._costs)
        self._latest[original] = copy
        if step.way.form is not Form.GATHER:
            self._take_apart(original, copy)

    def finish(self) -> None:
        """Let the caller read the latest copy of each gradient."""
        for node in self._output.all_input_nodes:
            if node.meta.get(Mark.PHASE) is Phase.BACKWARD and node not in self._placed:
                self._resolve(node)
        for node in self._joint.in_phase(Phase.BACKWARD):
            left_out = node not in self._placed and not self._placed.isdisjoint(node.users)
            assert not left_out, f"{node} was left out of the schedule"

    def _mark(self, node: fx.Node) -> None:
        node.meta[Mark.STAGE] = self._stage
        node.meta[Mark.SEGMENT] = self._segment
        self._placed.add(node)

    def _place(self, node: fx.Node) -> None:
        self._output.prepend(node)
        self._mark(node)

    def _read(self, node: fx.Node) -> None:
        for source in input_nodes(node):
            found = self._resolve(source)
            if found is not source:
                node.replace_input_with(source, found)

    def _take_apart(self, original: fx.Node, made: fx.Node) -> None:
        """Take the items out of a tuple at once, so that those that nobody reads die."""
        if not isinstance(original.meta.get("val"), (tuple, list)):
            return
        for user in list(original.users):
            if user.target is not operator.getitem or is_view(user) or user in self._placed:
                continue
            if user.args[1] >= len(made.meta["val"]):  # type: ignore[operator]
                continue  # a batch norm that is made again without running statistics has no new ones
            if original is made:
                self._place(user)
            else:
                with self._joint.graph.inserting_before(self._output):
                    item = self._joint.graph.node_copy(user)
                item.replace_input_with(original, made)
                item.meta = {**user.meta, Mark.PHASE: Phase.BACKWARD, Mark.ORIGIN: user.name}
                self._mark(item)
                self._latest[user] = item

    def _resolve(self, node: fx.Node) -> fx.Node:
        """The node to read for ``node`` here."""
        if node in self._joint.mutated_inputs:
            return self._snapshots.of(node)
        if node.op == "placeholder" or (node in self._placed and not is_view(node)):
            return node
        if node in self._latest:
            return self._latest[node]
        forward = node.meta[Mark.PHASE] is Phase.FORWARD
        if forward and (not is_view(node) or is_symbolic_scalar(node)):
            return node  # kept
        reads = tuple(self._resolve(source) for source in input_nodes(node))
        key = (node, self._stage, reads)
        if key in self._made:
            return self._made[key]
        if forward or node in self._placed:
            with self._joint.graph.inserting_before(self._output):
                view = self._joint.graph.node_copy(node)
            view.meta = dict(node.meta)
            view.meta[Mark.PHASE] = Phase.BACKWARD
            if forward:
                view.meta[Mark.ORIGIN] = node.name
            self._read(view)
            self._mark(view)
        else:
            view = node
            self._read(view)
            self._place(view)
        self._made[key] = view
        return view
