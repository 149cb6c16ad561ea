"""rematerialize: what is saved from forward to backward and what is computed again, as explicit nodes.

Two parts that know nothing of each other. A *chooser* (:func:`keep_all`, :func:`keep_stage_inputs`) returns the set of
forward values that may be kept. The *mechanics* (:func:`rematerialize`) rewrites the joint graph for any such set:
each stage's backward reads kept values directly and copies of the forward nodes for the rest. The copies are ordinary
nodes of phase ``recompute``; everything later (rng, codegen, a simulator) sees one explicit graph.

Three things hold whatever the chooser says:

- what is hoisted is kept, so its operation never runs twice; of ``sort`` and ``topk`` only the indices, by which the
  values are gathered again;
- graph inputs cost nothing to keep, except those that the caller updates in place after the forward: their value is
  copied before that;
- a view is never kept for itself: it is made again from what it views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from roundpipe_fx.analysis.cost import CostModel, annotate_node
from roundpipe_fx.analysis.recomputation import Form, Snapshots, repetition, selection
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    input_nodes,
    is_seeded,
    is_symbolic_scalar,
    is_view,
    node_outputs,
    viewed,
)

__all__ = ["keep_all", "keep_slot_inputs", "keep_stage_inputs", "rematerialize"]


def keep_all(joint: JointGraph) -> set[fx.Node]:
    """Chooser of ``recompute="none"``: every forward value may be kept."""
    return {output for node in joint.in_phase(Phase.FORWARD) for output in node_outputs(node)}


def keep_stage_inputs(joint: JointGraph) -> set[fx.Node]:
    """Chooser of ``recompute="full"``: each stage keeps only what enters it.

    A value that enters several stages (a skip, a rotary table) is kept once. Constants (a causal mask made from
    nothing but sizes) are not kept: making them again reads nothing.
    """
    return _entering(joint, lambda node: node.meta[Mark.STAGE])


def keep_slot_inputs(joint: JointGraph) -> set[fx.Node]:
    """Chooser where forward and backward are cut independently: each slot of the backward keeps what enters it.

    The slot that runs the forward's end and the backward's beginning keeps all, since it runs both at once.
    """
    forward = joint.in_phase(Phase.FORWARD)
    slot_of = _backward_slots(joint)
    fused = [node for node in forward if slot_of[node.meta[Mark.SEGMENT]] == node.meta[Mark.STAGE]]
    entering = _entering(joint, lambda node: slot_of[node.meta[Mark.SEGMENT]])
    return entering.union(output for node in fused for output in node_outputs(node))


def _backward_slots(joint: JointGraph) -> dict[int, int]:
    """For each segment the slot of its backward; one without gradients is counted to where that of the next one is."""
    ahead = {node.meta[Mark.SEGMENT]: node.meta[Mark.STAGE] for node in joint.in_phase(Phase.FORWARD)}
    back = {node.meta[Mark.SEGMENT]: node.meta[Mark.STAGE] for node in joint.in_phase(Phase.BACKWARD)}
    fused = max(ahead.values(), default=0)
    for segment in sorted(ahead.keys() - back.keys(), reverse=True):
        back[segment] = fused if ahead[segment] == fused else max(back.get(segment + 1, 0), fused + 1)
    return back


def _entering(joint: JointGraph, group: Callable[[fx.Node], int]) -> set[fx.Node]:
    """Forward values that cross from one group of nodes into another, constants left out."""
    constant: set[fx.Node] = set()
    entering: set[fx.Node] = set()
    forward = joint.in_phase(Phase.FORWARD)
    members = set(forward)
    for node in forward:
        sources = input_nodes(node)
        if not is_seeded(node) and all(source in constant for source in sources):
            constant.add(node)
        entering.update(s for s in sources if s in members and group(s) != group(node))
    return entering - constant


def rematerialize(joint: JointGraph, keep: Iterable[fx.Node], costs: CostModel) -> JointGraph:
    """Rewrite the graph so that the backward reads nothing of the forward but kept values.

    Args:
        joint: a graph with stages.
        keep: forward values (not tuples) that may be kept; see the module's text for what is kept regardless.
            Those that are marked as not to be kept are left out.
        costs: cost model for the nodes that are added.

    Returns:
        the graph, in which every node of phase backward or recompute reads only kept forward values
        (:func:`roundpipe_fx.ir.joint_graph.saved_values`), graph inputs, and nodes of those two phases.
    """
    kept = _kept(joint, [node for node in keep if Mark.NOT_KEPT not in viewed(node).meta])
    graph = joint.graph
    forward = joint.in_phase(Phase.FORWARD)
    position = {node: index for index, node in enumerate(forward)}
    by_stage: dict[int, list[fx.Node]] = {}
    for node in joint.in_phase(Phase.BACKWARD):
        by_stage.setdefault(node.meta[Mark.STAGE], []).append(node)
    snapshots = Snapshots(joint, costs)
    first_backward = next(iter(joint.in_phase(Phase.BACKWARD)), graph.output_node())
    for stage in sorted(by_stage, reverse=True):
        needed = {source for node in by_stage[stage] for source in input_nodes(node)}
        again = _closure((source for source in needed if source in position), kept, position)
        copies: dict[fx.Node, fx.Node] = {}
        for original in sorted(again, key=position.__getitem__):
            form = Form.SAME if selection(original) is None else Form.GATHER
            copy = repetition(joint, original, form, first_backward)
            _replace_inputs(copy, copies)
            if form is not Form.SAME:
                annotate_node(copy, costs)
            copy.meta[Mark.PHASE] = Phase.RECOMPUTE
            copy.meta[Mark.STAGE] = stage
            copies[original] = copy
        for node in by_stage[stage]:
            _replace_inputs(node, copies)
        if joint.mutated_inputs:
            for node in (*copies.values(), *by_stage[stage]):
                _replace_inputs(node, {s: snapshots.of(s) for s in input_nodes(node) if s in joint.mutated_inputs})
    return joint


def _kept(joint: JointGraph, keep: Iterable[fx.Node]) -> set[fx.Node]:
    kept = {node for node in keep if not is_view(node) and not isinstance(node.meta.get("val"), (tuple, list))}
    for node in joint.in_phase(Phase.FORWARD):
        if Mark.HOISTED in node.meta:
            kept.update(output for output in node_outputs(node) if selection(output) is None)
        elif is_symbolic_scalar(node):
            kept.add(node)
    # A kept view stands for what it views; without its base in the set it would be computed again from further back.
    for node in keep:
        base = viewed(node)
        if base.op != "placeholder" and not isinstance(base.meta.get("val"), (tuple, list)):
            kept.add(base)
    return kept


def _closure(needed: Iterable[fx.Node], kept: set[fx.Node], forward: dict[fx.Node, int]) -> set[fx.Node]:
    """Forward nodes that must run again to make ``needed`` from kept values and graph inputs."""
    found: set[fx.Node] = set()
    pending = [node for node in needed if node not in kept]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        assert Mark.HOISTED not in node.meta, f"{node} is hoisted and must not run again"
        found.add(node)
        picked = selection(node)
        reads = input_nodes(node) if picked is None else [picked[0]]
        pending += [source for source in reads if source in forward and source not in kept]
    return found


def _replace_inputs(node: fx.Node, replacements: dict[fx.Node, fx.Node]) -> None:
    for source in input_nodes(node):
        if source in replacements:
            node.replace_input_with(source, replacements[source])
