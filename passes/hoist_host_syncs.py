"""hoist_host_syncs: no host synchronization is repeated.

An operation that makes the host wait for the device, or that decides a shape or a route, runs once per step, in the
forward; its result is saved and it is never part of a recomputation. This pass marks such operations as hoisted, with
the reason, and moves them out of the backward where they do not depend on incoming gradients:

- host syncs and selections, by the predicate that counters and eager scopes use too
  (:mod:`roundpipe_fx.analysis.host_sync`);
- integers that an operation computes from data (a cast) and that a later forward operation uses to select or route,
  which is visible only in the whole graph;
- collectives of the forward (:mod:`roundpipe_fx.ir.collectives`);
- operators with bodies (``cond``, ``scan``) of which the host decides what runs, or which draw random numbers inside:
  their generator's state cannot be set for a repetition, because bodies draw in between other operations;
- operations with side effects, and those that the user registered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx, nn

from roundpipe_fx.analysis.host_sync import why_host_sync
from roundpipe_fx.ir.bodies import draws, draws_inside, list_bodies
from roundpipe_fx.ir.collectives import is_collective
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    has_side_effect,
    input_nodes,
    is_symbolic_scalar,
    is_view,
    node_outputs,
    tensor_values,
)

aten = torch.ops.aten

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)


def hoist_host_syncs(joint: JointGraph, registered: Collection[Any] = (), collectives: bool = True) -> JointGraph:
    """Mark operations that must not run twice, and move them with their operands to the forward. Runs after annotate.

    Args:
        registered: operators (``OpOverload`` or ``OpOverloadPacket``) that the user declared to force a host sync.
        collectives: whether those of the forward must not run twice: where all ranks follow one plan, they may.
    """
    tangent_dependent = joint.find_tangent_dependents()
    for node in list(joint.computed()):
        reason = _host_sync(node, registered, joint.module)
        if reason is None or (is_collective(node.target) and not collectives):
            continue
        # In the backward: what depends on incoming gradients, has effects or draws cannot move to the forward.
        if node.meta[Mark.PHASE] is not Phase.FORWARD:
            if node in tangent_dependent or has_side_effect(node) or draws(node, joint.module):
                continue
            _move_to_forward(joint, node)
        node.meta[Mark.MUST_SAVE] = reason
    return joint


def _host_sync(node: fx.Node, registered: Collection[Any], module: nn.Module) -> str | None:
    target = node.target
    if node.op == "get_attr" or target is aten.sym_size.int:
        return None
    if not isinstance(target, torch._ops.OpOverload):
        if target in registered:
            return "registered by the user"
        if node.meta.get("unbacked_bindings"):
            return "its size depends on data"
        if target is torch.ops.higher_order.with_effects:
            return "has a side effect"
        return _in_body(node, registered, module)
    # One predicate for passes, counters and eager scopes: see analysis/host_sync.py.
    operands = [value for source in input_nodes(node) for value in tensor_values(source)]
    reason = why_host_sync(target, node.args, operands, tensor_values(node), registered)
    if reason is not None:
        return reason
    if _is_decision(node):
        return "decides a route"
    if is_collective(target) and node.meta.get(Mark.PHASE) is Phase.FORWARD and tensor_values(node):
        return "communicates with other processes"
    return "has a side effect" if has_side_effect(node) else None


def _in_body(node: fx.Node, registered: Collection[Any], module: nn.Module) -> str | None:
    if node.target in (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop):
        return "the host reads its condition"
    if draws_inside(node, module):
        return "its body draws random numbers"
    for body in list_bodies(node, module):
        reasons = (_host_sync(inner, registered, body) for inner in body.graph.nodes if inner.op == "call_function")
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is not None:
            return f"in its body: {reason}"
    return None


def _is_decision(node: fx.Node) -> bool:
    """Return whether integers that ``node`` computes from data select or route in the forward."""
    if node.meta.get(Mark.PHASE) is not Phase.FORWARD or not any(map(_is_whole, node_outputs(node))) or is_view(node):
        return False
    if not any(value.is_floating_point() for source in input_nodes(node) for value in tensor_values(source)):
        return False
    picked = [output for output in node_outputs(node) if _is_whole(output)]
    return any(_routes(output) for output in picked)


def _is_whole(node: fx.Node) -> bool:
    values = tensor_values(node)
    return len(values) == 1 and values[0].dtype in _INTEGERS and values[0].dtype is not torch.bool


def _routes(picked: fx.Node) -> bool:
    """Return whether integers reach, through integer arithmetic, a forward operation that selects data by them."""
    seen = {picked}
    # Follow integers through integer operations to one that indexes or shapes a float: then they decide a route.
    pending = [picked]
    while pending:
        for user in _forward_users(pending.pop()):
            if user in seen:
                continue
            seen.add(user)
            values = tensor_values(user)
            if is_symbolic_scalar(user):
                return True
            if values and all(value.dtype in _INTEGERS for value in values):
                pending.append(user)
            elif _mixes(user):
                return True
    return False


def _forward_users(node: fx.Node) -> Iterator[fx.Node]:
    return (user for user in node.users if user.op != "output" and user.meta.get(Mark.PHASE) is Phase.FORWARD)


def _mixes(node: fx.Node) -> bool:
    """Return whether ``node`` reads both integers and data: it uses the former to select among the latter."""
    values = [value for source in input_nodes(node) for value in tensor_values(source)]
    return any(value.dtype in _INTEGERS for value in values) and any(
        value.is_floating_point() or value.is_complex() for value in values
    )


def _move_to_forward(joint: JointGraph, node: fx.Node) -> None:
    """Move ``node`` and the backward nodes that it needs to the forward, each right after its operands."""
    chain: list[fx.Node] = []
    pending = [node]
    # Everything that the operation needs and that is not of the forward moves with it.
    while pending:
        current = pending.pop()
        if current.op == "placeholder" or current.meta[Mark.PHASE] is Phase.FORWARD or current in chain:
            continue
        chain += [current, *(output for output in node_outputs(current) if output is not current)]
        pending += input_nodes(current)
    order = {item: position for position, item in enumerate(joint.graph.nodes)}
    last_input = max(joint.inputs, key=order.__getitem__)
    # In graph order, each behind its last source: the order stays topological.
    for current in sorted(chain, key=order.__getitem__):
        sources = [source for source in input_nodes(current) if source.op != "placeholder"]
        anchor = max(sources, key=order.__getitem__) if sources else last_input
        anchor.append(current)
        order = {item: position for position, item in enumerate(joint.graph.nodes)}
        current.meta[Mark.PHASE] = Phase.FORWARD
        current.meta["partitioner_tag"] = "is_forward"
