"""recompute_regions: constraints of the user's checkpoints, policies, scopes and saved data on what is saved.

Uses of ``torch.utils.checkpoint``, ``save_for_recompute`` and ``gradient_checkpoint_scope`` become marks, which bind
the planner and every save policy:

- *must save*: values passed to ``save_for_recompute``, values that a selective policy must save or offload, and random
  numbers in a checkpoint that does not preserve the generator state;
- *must recompute*: values that a checkpoint computes and only it reads, unless the policy prefers to save them; and all
  values that are computed in a gradient checkpoint scope, whatever reads them;
- *on the host*, if saved: values that a selective policy must offload, and inputs of checkpoints that ask for it.

Hoisted values stay hoisted inside a checkpoint. Values that leave a checkpoint may be saved, for their readers outside;
so may inputs, which cost nothing. Of nested checkpoints the outermost decides what is saved from the forward; the inner
ones matter when the outer one is recomputed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from roundpipe_fx.analysis.recomputation import selection
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    input_nodes,
    is_seeded,
    is_symbolic_scalar,
    is_view,
    node_outputs,
    readers_behind_views,
    tensor_values,
    viewed,
)
from roundpipe_fx.ir.recompute_marks import (
    is_in_scope,
    keeps_generator_state,
    offloading_inputs,
    read_checkpoints,
    read_policy,
    saves_for_recompute,
)


def mark_recompute_regions(joint: JointGraph, replays_random: bool = True) -> JointGraph:
    """Mark values that must and must not be saved. Runs after hoist_host_syncs, before the graph is cut.

    Args:
        replays_random: whether random operations may be replayed at all; else their results are saved.

    Returns:
        the graph, with marks, and without the nodes that record the arguments of ``save_for_recompute``.
    """
    for node in list(joint.computed()):
        if saves_for_recompute(node):
            _hoist_saved(node)
            joint.graph.erase_node(node)
    # What has to be saved, first: must recompute yields to it.
    for node in joint.in_phase(Phase.FORWARD):
        reason = _must_be_saved(node, replays_random)
        if reason is not None and Mark.MUST_SAVE not in node.meta and not is_view(node) and tensor_values(node):
            node.meta[Mark.MUST_SAVE] = reason
            if _policy(node) == "MUST_CPU_OFFLOAD":
                node.meta[Mark.ON_HOST] = True
        for source in input_nodes(node) if offloading_inputs(node) else ():
            # The outermost checkpoint that asks for it sees the source as an input.
            if not set(offloading_inputs(node)).issubset(offloading_inputs(source)):
                viewed(source).meta[Mark.ON_HOST] = True
    for node in joint.in_phase(Phase.FORWARD):
        reason = None if is_view(node) or is_symbolic_scalar(node) else _must_not_be_kept(node)
        for output in node_outputs(node) if reason is not None else ():
            # Of a sort only the indices are saved; the sorted values may be gathered again.
            may_recompute = Mark.MUST_SAVE not in node.meta or selection(output) is not None
            if may_recompute and (is_in_scope(node) or _is_read_only_inside(output)):
                output.meta[Mark.MUST_RECOMPUTE] = reason
    return joint


def region_bounds(joint: JointGraph) -> list[int]:
    """Forward positions at which a checkpoint that does arithmetic begins or ends.

    A segment should not extend across these, because it would be recomputed in part.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    working = set()
    forward = joint.in_phase(Phase.FORWARD)
    for position, node in enumerate(forward):
        for number in read_checkpoints(node):
            first.setdefault(number, position)
            last[number] = position
            if node.meta.get(Mark.FLOPS):
                working.add(number)
    # Checkpoints without arithmetic are no reason to cut.
    bounds = {first[number] for number in working} | {last[number] + 1 for number in working}
    return sorted(bound for bound in bounds if 0 < bound < len(forward))


def _hoist_saved(save: fx.Node) -> None:
    for source in input_nodes(save):
        maker = viewed(source)
        if maker.target is operator.getitem:  # one of several results: it is the operation that must not be recomputed
            (maker,) = input_nodes(maker)
        if maker.op != "placeholder":
            maker.meta.setdefault(Mark.MUST_SAVE, "given to save_for_recompute")


def _must_be_saved(node: fx.Node, replays_random: bool) -> str | None:
    if _policy(node) == "MUST_SAVE":
        return "its checkpoint's policy must save it"
    if _policy(node) == "MUST_CPU_OFFLOAD":
        return "its checkpoint's policy must offload it"
    if is_seeded(node) and not (replays_random and keeps_generator_state(node)):
        return "drawn where preserve_rng_state=False"
    return None


def _must_not_be_kept(node: fx.Node) -> str | None:
    if is_in_scope(node):
        return "computed in a gradient checkpoint scope"
    if read_checkpoints(node) and _policy(node) not in ("PREFER_SAVE", "PREFER_CPU_OFFLOAD"):
        return "computed in a checkpoint"
    return None


def _policy(node: fx.Node) -> str | None:
    """Name of a node's policy: not all supported versions of PyTorch have those that offload."""
    policy = read_policy(node)
    return None if policy is None else policy.name


def _is_read_only_inside(node: fx.Node) -> bool:
    """Return whether all forward readers of a value are in the same outermost checkpoint."""
    outermost = read_checkpoints(node)[:1]
    return all(read_checkpoints(reader)[:1] == outermost for reader in _forward_readers(node))


def _forward_readers(node: fx.Node) -> Iterator[fx.Node]:
    for reader in readers_behind_views(node):
        if reader.op != "output" and reader.meta.get(Mark.PHASE) is Phase.FORWARD:
            yield reader
