"""Save policies: what is saved from forward to backward where no byte budget decides.

A policy (:func:`save_all`, :func:`save_stage_inputs`, :func:`save_slot_inputs`) returns the set of forward values that
may be saved; :func:`recompute_unsaved` turns that into a schedule: each stage recomputes all other values that its
backward reads at once, before its incoming gradients arrive. Three rules hold under every policy:

- hoisted values are saved, so their operations never run twice; of ``sort`` and ``topk`` only the indices are, by which
  the values are gathered when recomputed;
- graph inputs cost nothing to save, except those that the caller updates in place after the forward: their value is
  copied before that;
- a view is never saved itself: it is recomputed from its base.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping

from torch import fx

from roundpipe_fx.analysis.recomputation import Form, selection
from roundpipe_fx.analysis.remat_schedule import BackwardOp, RematBlock, RematSchedule
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    input_nodes,
    is_seeded,
    is_symbolic_scalar,
    node_outputs,
    viewed,
)

SavePolicy = Callable[[JointGraph], Collection[fx.Node]]
"""Forward values (no tuples) of a graph with stages that may be saved."""


def save_all(joint: JointGraph) -> set[fx.Node]:
    """Policy of ``recompute="none"``: every forward value may be saved."""
    return {output for node in joint.in_phase(Phase.FORWARD) for output in node_outputs(node)}


def save_stage_inputs(joint: JointGraph) -> set[fx.Node]:
    """Policy of ``recompute="full"``: each stage saves only what enters it.

    A value that enters several stages (a skip, a rotary table) is saved once. Constants (a causal mask made from
    nothing but sizes) are not saved: recomputing them reads nothing.
    """
    return _find_crossing_values(joint, lambda node: node.meta[Mark.STAGE])


def save_slot_inputs(joint: JointGraph) -> set[fx.Node]:
    """Policy for forward and backward that are cut independently: what enters a slot of the backward is saved.

    The slot that runs the forward's end and the backward's beginning saves everything, since it runs both at once.
    """
    forward = joint.in_phase(Phase.FORWARD)
    slot_of = _backward_slots(joint)
    fused = [node for node in forward if slot_of[node.meta[Mark.SEGMENT]] == node.meta[Mark.STAGE]]
    entering = _find_crossing_values(joint, lambda node: slot_of[node.meta[Mark.SEGMENT]])
    return entering.union(output for node in fused for output in node_outputs(node))


def _backward_slots(joint: JointGraph) -> dict[int, int]:
    """For each segment the slot of its backward; one without gradients belongs to the slot of the next one."""
    ahead = {node.meta[Mark.SEGMENT]: node.meta[Mark.STAGE] for node in joint.in_phase(Phase.FORWARD)}
    back = {node.meta[Mark.SEGMENT]: node.meta[Mark.STAGE] for node in joint.in_phase(Phase.BACKWARD)}
    fused = max(ahead.values(), default=0)
    # From the last segment back: one without a backward of its own joins the slot of the segment behind it. Segments of
    # the fused slot stay there.
    for segment in sorted(ahead.keys() - back.keys(), reverse=True):
        back[segment] = fused if ahead[segment] == fused else max(back.get(segment + 1, 0), fused + 1)
    return back


def _find_crossing_values(joint: JointGraph, group: Callable[[fx.Node], int]) -> set[fx.Node]:
    """Forward values that cross from one group of nodes into another, constants left out."""
    constant: set[fx.Node] = set()
    entering: set[fx.Node] = set()
    forward = joint.in_phase(Phase.FORWARD)
    members = set(forward)
    # Constants spread forward: a node is one if all that it reads are and it draws nothing.
    for node in forward:
        sources = input_nodes(node)
        if not is_seeded(node) and all(source in constant for source in sources):
            constant.add(node)
        entering.update(s for s in sources if s in members and group(s) != group(node))
    return entering - constant


def recompute_unsaved(joint: JointGraph, saved: Iterable[fx.Node]) -> RematSchedule:
    """The schedule in which each stage recomputes everything that it reads and that is not saved.

    Args:
        joint: a graph with stages; not changed.
        saved: forward values (no tuples) that may be saved; see the module's docstring for what is saved regardless.
            Those marked as must-recompute are left out.

    Returns:
        # A saved view has no memory of its own, so saving its base is what saves it.
        the schedule: recomputations early, in the order of the forward; then the backward in the graph's order.
    """
    # A saved view stands for its base; without the base in the set it would be recomputed from further back.
    kept = _find_kept(joint, map(viewed, saved))
    position = {node: index for index, node in enumerate(joint.in_phase(Phase.FORWARD))}
    backward = joint.in_phase(Phase.BACKWARD)
    by_stage: dict[int, list[fx.Node]] = {}
    for node in backward:
        by_stage.setdefault(node.meta[Mark.STAGE], []).append(node)
    blocks = []
    # Stages from the last to the first, which is the order of the backward.
    for stage in sorted(by_stage, reverse=True):
        needed = {source for node in by_stage[stage] for source in input_nodes(node)}
        recomputed = sorted(_find_recomputed(needed & position.keys(), kept, position), key=position.__getitem__)
        for segment, nodes in itertools.groupby(recomputed, key=lambda node: node.meta[Mark.SEGMENT]):
            blocks.append(RematBlock(segment, stage, tuple(map(_recomputed, nodes))))
    for (stage, segment), nodes in itertools.groupby(backward, key=_stage_and_segment):
        blocks.append(RematBlock(segment, stage, tuple(map(BackwardOp, nodes))))
    return RematSchedule(tuple(blocks), frozenset(kept))


def _recomputed(node: fx.Node) -> BackwardOp:
    return BackwardOp(node, Form.SAME if selection(node) is None else Form.GATHER, early=True)


def _stage_and_segment(node: fx.Node) -> tuple[int, int]:
    return node.meta[Mark.STAGE], node.meta[Mark.SEGMENT]


def _find_kept(joint: JointGraph, bases: Iterable[fx.Node]) -> set[fx.Node]:
    kept = {
        base
        for base in bases
        if base.op != "placeholder"
        and Mark.MUST_RECOMPUTE not in base.meta
        and not isinstance(base.meta.get("val"), (tuple, list))
    }
    for node in joint.in_phase(Phase.FORWARD):
        # Of `sort` and `topk` only the indices must be saved; the values follow from them by a gather.
        if Mark.MUST_SAVE in node.meta:
            # A selective policy may ask for the values of a selection, too.
            kept.update(o for o in node_outputs(node) if selection(o) is None or Mark.MUST_SAVE in o.meta)
        elif is_symbolic_scalar(node):
            kept.add(node)
    return kept


def _find_recomputed(needed: Iterable[fx.Node], kept: set[fx.Node], forward: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Forward nodes that must be recomputed to obtain ``needed`` from saved values and graph inputs."""
    closure: set[fx.Node] = set()
    pending = [node for node in needed if node not in kept]
    while pending:
        node = pending.pop()
        if node in closure:
            continue
        assert Mark.MUST_SAVE not in node.meta, f"{node} is hoisted and must not be recomputed"
        closure.add(node)
        picked = selection(node)
        # A selection is recomputed by a gather from its operand; the sort itself never runs again.
        reads = input_nodes(node) if picked is None else [picked[0]]
        pending += [source for source in reads if source in forward and source not in kept]
    return closure
