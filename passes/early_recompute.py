"""early_recompute: moves further operations of the backward to before the incoming gradients arrive.

Nodes of the backward that do not depend on a tangent join the recomputation of their stage, so they can run while the
stage waits for its gradient. But a value that is computed early is held until the gradient has arrived. Which of them
start early is therefore a minimum cut: of all divisions of these nodes into recomputation and backward, one that passes
the fewest bytes from the first to the second, and among those the one that starts the most. (Derivatives like ``2 x``
of a saved ``x`` therefore wait, while a cast to fewer bytes or a reduction starts early.)

Seeded operations always wait: their order is the program's. Views go where they are read; a view that both sides read
is created twice, since only its base needs to be passed. So is a cast to a wider dtype (a norm that computes in
float32): passing the narrow value and repeating the cast just before it is read holds half the bytes for the price of
one pointwise operation.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from roundpipe_fx.analysis.minimum_cut import SINK, SOURCE, UNCUTTABLE, Arc, choose_unit, minimum_cut
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    input_nodes,
    is_seeded,
    is_view,
    readers_behind_views,
    storages,
    viewed,
)


def early_recompute(joint: JointGraph) -> JointGraph:
    """Move nodes that gain by it from phase backward to phase recompute. Runs where no budget decides."""
    waits = set(joint.tangents)
    free: dict[int, list[fx.Node]] = {}
    # In graph order, so `waits` is complete for the sources of each node.
    for node in joint.in_phase(Phase.BACKWARD):
        if any(source in waits for source in input_nodes(node)) or is_seeded(node):
            waits.add(node)
        else:
            free.setdefault(node.meta[Mark.STAGE], []).append(node)
    for nodes in free.values():
        views = {node for node in nodes if is_view(node)}
        # Views are left out of the cut; they follow their readers below.
        late = _cut([node for node in nodes if node not in views])
        for node in nodes:
            if node not in late:
                node.meta[Mark.PHASE] = Phase.RECOMPUTE
    _move_views(joint)
    _end_early(joint)
    if _widen_late(joint):
        _move_views(joint)
    return joint


def _end_early(joint: JointGraph) -> None:
    """A stage whose gradients depend on no incoming gradient has nothing to start before: all of it is its backward."""
    # A stage whose backward would be empty runs everything late: there is nothing that could overlap.
    early = _by_stage(joint, Phase.RECOMPUTE)
    for stage in early.keys() - _by_stage(joint, Phase.BACKWARD).keys():
        for node in early[stage]:
            node.meta[Mark.PHASE] = Phase.BACKWARD


def _by_stage(joint: JointGraph, phase: Phase) -> dict[int, list[fx.Node]]:
    by_stage: dict[int, list[fx.Node]] = {}
    for node in joint.in_phase(phase):
        by_stage.setdefault(node.meta[Mark.STAGE], []).append(node)
    return by_stage


def _cut(candidates: list[fx.Node]) -> set[fx.Node]:
    """The fewest of ``candidates`` (nodes of one stage, no views) that should wait.

    Each value has two vertices, "computed late" and "passed late". A value that is computed early and read late is
    passed early, which costs its bytes; only the arc between the two can be cut::

        source ─▶ passed late ──its bytes─▶ computed late ─▶ sink
             ^                                      ^
             if the backward reads it               if it is no candidate, but computed before
    """
    if not candidates:
        return set()
    members = set(candidates)
    values = list(dict.fromkeys([*candidates, *(source for node in candidates for source in _viewed_inputs(node))]))
    sizes = {value: _bytes(value) for value in values if value.op != "placeholder"}
    vertex_of = {value: 2 + 2 * index for index, value in enumerate(sizes)}
    unit = choose_unit(sizes.values())
    arcs: list[Arc] = []
    # Numbers: `made` is "computed late", the next one "passed late".
    for value, size in sizes.items():
        handed = vertex_of[value] + 1
        arcs.append((handed, vertex_of[value], size // unit))
        if value not in members:
            arcs.append((vertex_of[value], SINK, UNCUTTABLE))
        for user in readers_behind_views(value):
            if user in members:
                arcs.append((vertex_of[user], handed, UNCUTTABLE))  # a value that is not passed has only early readers
                arcs.append((vertex_of[value], vertex_of[user], UNCUTTABLE))  # a node starts only if its operands do
            elif user.op == "output" or user.meta[Mark.PHASE] is Phase.BACKWARD:
                arcs.append((SOURCE, handed, UNCUTTABLE))
    _, late = minimum_cut(arcs, 2 + 2 * len(sizes))
    return {node for node in candidates if vertex_of[node] in late}


def _bytes(node: fx.Node) -> int:
    """Bytes that holding the value keeps allocated: all of its storage, whichever node allocated it."""
    inside = set(storages(node))
    maker = node
    # A view of a view has no bytes of its own: those of the storage's maker count.
    while not maker.meta.get(Mark.BYTES) and maker.all_input_nodes:
        shared = [source for source in input_nodes(maker) if inside & set(storages(source))]
        if not shared or shared[0].op == "placeholder":
            break
        maker = shared[0]
    return int(maker.meta.get(Mark.BYTES, 0))


def _viewed_inputs(node: fx.Node) -> Iterable[fx.Node]:
    """The operands of a node, with views replaced by their bases."""
    return (viewed(source) for source in input_nodes(node))


def _widen_late(joint: JointGraph) -> bool:
    """Repeat casts to a wider type in the backward, just before their first reader there. Whether there were any."""
    position = {node: index for index, node in enumerate(joint.graph.nodes)}
    widened = False
    for node in joint.in_phase(Phase.RECOMPUTE):
        readers = [user for user in node.users if user.op != "output" and _is_in_same_backward(node, user)]
        if not readers or not _widens(node):
            continue
        widened = True
        with joint.graph.inserting_before(min(readers, key=position.__getitem__)):
            twin = joint.graph.node_copy(node)
        twin.meta = dict(node.meta)
        twin.meta[Mark.PHASE] = Phase.BACKWARD
        for user in readers:
            user.replace_input_with(node, twin)
    return widened


def _widens(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten._to_copy.default or node.kwargs.keys() - {"dtype", "layout", "device"}:
        return False
    (source,) = input_nodes(node)
    narrow, wide = source.meta["val"], node.meta["val"]
    floats = narrow.is_floating_point() and wide.is_floating_point()
    return floats and narrow.device == wide.device and narrow.dtype.itemsize < wide.dtype.itemsize


def _move_views(joint: JointGraph) -> None:
    """Views go where they are read: into the recomputation, the backward, or both."""
    for node in reversed(joint.in_phase(Phase.RECOMPUTE)):
        if not is_view(node):
            continue
        readers = [user for user in node.users if _is_in_same_backward(node, user)]
        base = viewed(node)
        # Even if only another stage reads it, it comes after its base.
        waits = base.op != "placeholder" and _is_in_same_backward(node, base)
        if not readers and not waits:
            continue
        if len(readers) == len(node.users) or waits:
            node.meta[Mark.PHASE] = Phase.BACKWARD
            continue
        with joint.graph.inserting_after(node):
            twin = joint.graph.node_copy(node)
        twin.meta = dict(node.meta)
        twin.meta[Mark.PHASE] = Phase.BACKWARD
        for user in readers:
            user.replace_input_with(node, twin)


def _is_in_same_backward(node: fx.Node, user: fx.Node) -> bool:
    """Return whether ``user`` runs in the backward of the stage of ``node`` (or is the graph's output)."""
    if user.op == "output":
        return True
    return user.meta[Mark.PHASE] is Phase.BACKWARD and user.meta[Mark.STAGE] == node.meta[Mark.STAGE]
