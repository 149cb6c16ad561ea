"""apply_remat_schedule: writes the rematerialization schedule into the graph, as explicit nodes in its order.

A :class:`RematSchedule` lists the operations of the backward and the forward operations that are recomputed among
them. Here each recomputation becomes a copy of its node, every reader reads the latest copy of each operand, and the
graph is put into the schedule's order. Early operations get phase recompute, the others phase backward. A forward value
that no operation recomputes is saved. After this pass everything is explicit in one graph.

Views cost nothing and need not be in the schedule: they are created where they are read, from the latest copy of their
base there, so that none holds a storage longer than the schedule says. A view that both phases of a stage read is
created in each, since only its base needs to be passed.
"""

from __future__ import annotations

import operator

from torch import fx

from roundpipe_fx.analysis.cost import CostModel, annotate_node
from roundpipe_fx.analysis.recomputation import Form, repetition
from roundpipe_fx.analysis.remat_schedule import BackwardOp, RematSchedule
from roundpipe_fx.analysis.snapshots import Snapshots
from roundpipe_fx.ir.bodies import is_body
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    has_side_effect,
    input_nodes,
    is_symbolic_scalar,
    is_view,
    storages,
    tensor_values,
)


def apply_remat_schedule(joint: JointGraph, schedule: RematSchedule, costs: CostModel) -> JointGraph:
    """Rewrite the backward as scheduled.

    Args:
        joint: a graph with stages; it is rewritten.
        schedule: what is recomputed and when. A segment may have no backward of its own and recompute values for
            others.
        costs: cost model for the nodes that are added.

    Returns:
        the graph, its backward in the order of the schedule, in which every node of phase backward or recompute reads
        only saved forward values (:func:`roundpipe_fx.ir.joint_graph.saved_values`), graph inputs, and nodes of these
        two phases.
    """
    writer = _Writer(joint, schedule, costs)
    # Nodes are appended at the end of the graph in the schedule's order; what is not listed (views) follows its
    # readers.
    for block in schedule.blocks:
        writer.begin(block.segment, block.stage)
        for op in block.ops:
            writer.run(op)
        writer.end()
    writer.finish()
    return joint


class _Writer:
    """Places nodes at the end of the graph, one after another."""

    def __init__(self, joint: JointGraph, schedule: RematSchedule, costs: CostModel) -> None:
        self._joint = joint
        self._costs = costs
        self._snapshots = Snapshots(joint, costs)
        self._output = joint.graph.output_node()
        self._segment = self._stage = 0
        self._phase = Phase.BACKWARD
        self._saved = schedule.saved
        self._latest: dict[tuple[fx.Node, int | None], fx.Node] = {}
        """By node and stage, the copy that readers get from here on; ``None`` stands for stages without their own
        copy."""
        self._views: dict[tuple[fx.Node, int, Phase, tuple[fx.Node, ...]], fx.Node] = {}
        """Views by original, the stage and phase in which they are created, and their operands there."""
        self._placed: set[fx.Node] = set()
        self._unlisted: dict[int, list[fx.Node]] = {}
        listed = set(schedule.nodes())
        # Views and side effects are not part of schedules: they are placed on demand, or at the end of their segment.
        for node in joint.in_phase(Phase.BACKWARD):
            if node not in listed and (is_view(node) or has_side_effect(node)):
                self._unlisted.setdefault(node.meta[Mark.SEGMENT], []).append(node)

    def begin(self, segment: int, stage: int) -> None:
        """A block of a segment's backward begins."""
        self._segment, self._stage = segment, stage

    def end(self) -> None:
        """A block ends: views that only the caller reads are created."""
        self._phase = Phase.BACKWARD
        for node in self._unlisted.get(self._segment, ()):
            if node not in self._placed and (self._output in node.users or has_side_effect(node)):
                self._resolve(node)

    def run(self, op: BackwardOp) -> None:
        """Place one operation."""
        self._phase = Phase.RECOMPUTE if op.early else Phase.BACKWARD
        node = op.node
        item = node.target is operator.getitem and not is_view(node) and op.form is not Form.GATHER
        if item and (node in self._placed or (node, self._stage) in self._latest):  # taken out of its tuple already
            return
        if op.form is None:
            self._read(node)
            self._append(node)
            self._take_apart(node, node)
            if is_view(node):
                self._note(node, node)
            return
        # A copy of the forward node, in the form that the schedule names (the same, a gather, or a mask alone).
        copy = repetition(self._joint, node, op.form, self._output)
        if op.rng_shape_source is not None:
            copy.update_arg(0, op.rng_shape_source)
        self._read(copy)
        self._append(copy)  # after the views that it reads
        if op.form is not Form.SAME or copy.target != node.target:
            annotate_node(copy, self._costs)
        self._note(node, copy)
        if op.form is not Form.GATHER:
            self._take_apart(node, copy)

    def finish(self) -> None:
        """Let the caller read the latest copy of each gradient."""
        self._phase = Phase.BACKWARD
        for node in self._output.all_input_nodes:
            if node.meta.get(Mark.PHASE) is Phase.BACKWARD and node not in self._placed:
                self._resolve(node)
        for node in self._joint.in_phase(Phase.BACKWARD):
            left_out = node not in self._placed and not self._placed.isdisjoint(node.users)
            assert not left_out, f"{node} was left out of the schedule"

    def _note(self, original: fx.Node, copy: fx.Node) -> None:
        self._latest[original, None] = self._latest[original, self._stage] = copy

    def _mark(self, node: fx.Node) -> None:
        node.meta[Mark.PHASE] = self._phase
        node.meta[Mark.STAGE] = self._stage
        node.meta[Mark.SEGMENT] = self._segment
        self._placed.add(node)

    def _append(self, node: fx.Node) -> None:
        self._output.prepend(node)
        self._mark(node)

    # Every operand is replaced by its latest copy in this stage, or by the saved value.
    def _read(self, node: fx.Node) -> None:
        viewing, moved = is_view(node), False
        for source in input_nodes(node):
            resolved = self._resolve(source)
            if resolved is not source:
                node.replace_input_with(source, resolved)
                moved |= storages(resolved) != storages(source)
        if viewing and moved:
            # The copy of an updated input has a storage of its own, and so have its views: what writes over a view
            # must see that the copy may still be read.
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            with tensor_values(node)[0].fake_mode:  # type: ignore[attr-defined]
                node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]

    def _take_apart(self, original: fx.Node, copied: fx.Node) -> None:
        """Unpack a tuple at once, so that items that are not read die."""
        if not isinstance(original.meta.get("val"), (tuple, list)):
            return
        for user in list(original.users):
            if user.target is not operator.getitem or is_view(user) or user in self._placed:
                continue
            if user.args[1] >= len(copied.meta["val"]):  # type: ignore[operator]
                continue  # a batch norm that is recomputed without running statistics has no new ones
            if original is copied:
                self._append(user)
            else:
                with self._joint.graph.inserting_before(self._output):
                    item = self._joint.graph.node_copy(user)
                item.replace_input_with(original, copied)
                item.meta = {**user.meta, Mark.ORIGIN: user.name}
                self._mark(item)
                self._note(user, item)

    def _resolve(self, node: fx.Node) -> fx.Node:
        """The node to read for ``node`` here."""
        # The order decides: an updated input's old value, a saved value, the latest copy of this stage, then of any.
        if node in self._joint.mutated_inputs:
            return self._snapshots.get_copy(node)
        if node in self._saved:
            return node
        for stage in (self._stage, None):
            if (node, stage) in self._latest:
                return self._latest[node, stage]
        forward = node.meta.get(Mark.PHASE) is Phase.FORWARD
        free = is_view(node) or is_body(node)
        made_anywhere = free or (is_symbolic_scalar(node) and not forward)
        if node.op == "placeholder" or (node in self._placed and not made_anywhere):
            return node
        if forward and (not free or is_symbolic_scalar(node)):
            return node  # saved
        # The same view of the same copies exists once per stage and phase.
        reads = tuple(self._resolve(source) for source in input_nodes(node))
        key = (node, self._stage, self._phase, reads)
        if key in self._views:
            return self._views[key]
        if forward or node in self._placed:
            with self._joint.graph.inserting_before(self._output):
                view = self._joint.graph.node_copy(node)
            view.meta = dict(node.meta)
            if forward:
                view.meta[Mark.ORIGIN] = node.name
            self._read(view)
            self._mark(view)
        else:
            view = node
            self._read(view)
            self._append(view)
        self._views[key] = view
        return view
