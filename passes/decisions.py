"""decisions: no question is asked twice.

An operation that makes the host wait for the device, or that decides a shape or a route, runs once a step, in the
forward; its result is saved and it is never part of a recomputation. This pass marks such operations as hoisted, with
the reason, and moves them out of the backward where they do not depend on incoming gradients. What asks is recognized
by operator tags and argument types, not by names:

- tags ``dynamic_output_shape`` and ``data_dependent_output`` (``nonzero``, ``unique``, ``item``); ``index`` carries
  the first always and asks only when indexed by a mask;
- copies from an accelerator to the host;
- *decisions*: whole numbers that an operation makes out of data (``topk``, ``sort``, ``argmax``, ``multinomial``,
  ``searchsorted``, a cast) and that a later forward operation uses to select or route. Pooling indices, which only the
  pooling's own backward reads, are no decision;
- operations with side effects, and those that the user registered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from roundpipe_fx.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    has_side_effect,
    has_tag,
    input_nodes,
    is_mask,
    is_seeded,
    is_symbolic_scalar,
    is_view,
    node_outputs,
    tensor_values,
)

__all__ = ["hoist_decisions"]

aten = torch.ops.aten

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)


def hoist_decisions(joint: JointGraph, registered: Collection[Any] = ()) -> JointGraph:
    """Mark what must not run twice and move it, with what it needs, from the backward to the forward. After annotate.

    Args:
        joint: an annotated graph.
        registered: operators (``OpOverload`` or ``OpOverloadPacket``) that the user declared to force a host sync.
    """
    tangent_dependent = _tangent_dependent(joint)
    for node in list(joint.computed()):
        reason = _question(node, registered)
        if reason is None:
            continue
        if node.meta[Mark.PHASE] is not Phase.FORWARD:
            if node in tangent_dependent or has_side_effect(node) or is_seeded(node):
                continue
            _move_to_forward(joint, node)
        node.meta[Mark.HOISTED] = reason
    return joint


def _question(node: fx.Node, registered: Collection[Any]) -> str | None:
    target = node.target
    if node.op == "get_attr" or target is aten.sym_size.int:
        return None
    if target in registered or getattr(target, "overloadpacket", None) in registered:
        return "registered by the user"
    if isinstance(target, torch._ops.OpOverload):
        if has_tag(target, torch.Tag.data_dependent_output):
            return "its result is read by the host"
        if has_tag(target, torch.Tag.dynamic_output_shape) and not _is_plain_index(node):
            return "its size depends on data"
        if _copies_to_host(node):
            return "copied from the device to the host"
        if _is_decision(node):
            return "decides a route"
        if has_side_effect(node):
            return "has a side effect"
    elif node.meta.get("unbacked_bindings"):
        return "its size depends on data"
    elif target is torch.ops.higher_order.with_effects:
        return "has a side effect"
    return None


def _is_plain_index(node: fx.Node) -> bool:
    if node.target is not aten.index.Tensor:
        return False
    return not any(isinstance(index, fx.Node) and is_mask(index) for index in node.args[1])  # type: ignore[union-attr]


def _copies_to_host(node: fx.Node) -> bool:
    result = tensor_values(node)
    sources = [value for source in input_nodes(node) for value in tensor_values(source)]
    return (
        bool(result)
        and all(value.device.type == "cpu" for value in result)
        and any(value.device.type not in ("cpu", "meta") for value in sources)
    )


def _is_decision(node: fx.Node) -> bool:
    """Whether whole numbers that ``node`` makes out of data select or route in the forward."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if node.meta.get(Mark.PHASE) is not Phase.FORWARD or not any(map(_is_whole, node_outputs(node))) or is_view(node):
        return False
    reads_data = any(
        value.is_floating_point() or _selects(target) for source in input_nodes(node) for value in tensor_values(source)
    )
    if not reads_data:
        return False
    picked = [output for output in node_outputs(node) if _is_whole(output)]
    return any(_routes(output) for output in picked)


def _selects(target: torch._ops.OpOverload) -> bool:
    """Whether the operator's schema names a result ``indices`` (``topk``, ``sort``, ``max`` along a dimension)."""
    return any(result.name == "indices" for result in target._schema.returns)


def _is_whole(node: fx.Node) -> bool:
    values = tensor_values(node)
    return len(values) == 1 and values[0].dtype in _INTEGERS and values[0].dtype is not torch.bool


def _routes(picked: fx.Node) -> bool:
    """Whether whole numbers reach, through whole-number arithmetic, a forward operation that selects data by them."""
    seen = {picked}
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
    """Whether ``node`` reads both whole numbers and data: it uses the former to select among the latter."""
    values = [value for source in input_nodes(node) for value in tensor_values(source)]
    return any(value.dtype in _INTEGERS for value in values) and any(
        value.is_floating_point() or value.is_complex() for value in values
    )


def _tangent_dependent(joint: JointGraph) -> set[fx.Node]:
    found: set[fx.Node] = set(joint.tangents)
    for node in joint.computed():
        if any(source in found for source in input_nodes(node)):
            found.add(node)
    return found


def _move_to_forward(joint: JointGraph, node: fx.Node) -> None:
    """Make ``node`` and the backward nodes that it needs part of the forward, each right after what it reads."""
    chain: list[fx.Node] = []
    pending = [node]
    while pending:
        current = pending.pop()
        if current.op == "placeholder" or current.meta[Mark.PHASE] is Phase.FORWARD or current in chain:
            continue
        chain += [current, *(output for output in node_outputs(current) if output is not current)]
        pending += input_nodes(current)
    order = {item: position for position, item in enumerate(joint.graph.nodes)}
    last_input = max(joint.inputs, key=order.__getitem__)
    for current in sorted(chain, key=order.__getitem__):
        sources = [source for source in input_nodes(current) if source.op != "placeholder"]
        anchor = max(sources, key=order.__getitem__) if sources else last_input
        anchor.append(current)
        order = {item: position for position, item in enumerate(joint.graph.nodes)}
        current.meta[Mark.PHASE] = Phase.FORWARD
        current.meta["partitioner_tag"] = "is_forward"
