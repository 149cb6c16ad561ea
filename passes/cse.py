"""cse: values that several layers compute alike are computed and saved once.

A traced model computes the same from the same values repeatedly: each layer of a language model turns one mask into
numbers for its attention, and saves them for the backward. Without recomputation one copy serves all: it lives from the
first to the last of their backwards in any case. With recomputation this would cost memory, since a value that many
segments read must live across all of them, so graphs that the planner searches are left as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.graph_edit import substitute_node, views_of
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, has_side_effect, is_seeded, is_tensor, is_view


def eliminate_common_subexpressions(joint: JointGraph) -> JointGraph:
    """Replace forward values by the earlier ones that :func:`common_subexpressions` returns for them."""
    for node, equal in common_subexpressions(joint).items():
        substitute_node(node, equal)
    joint.drop_unread()
    return joint


def common_subexpressions(joint: JointGraph) -> dict[fx.Node, fx.Node]:
    """Forward values that equal an earlier one which the backward reads, each with that one; and those that were made
    anew for their readers (wide_values).

    Results of one operator on equal arguments are equal. Outputs of the forward are left out, because each must be a
    separate tensor.
    """
    returned = {value for value in joint.forward_outputs if isinstance(value, fx.Node)}
    firsts: dict[Any, list[fx.Node]] = {}
    first_equal: dict[fx.Node, fx.Node] = {}  # to each value the first that equals it
    read: dict[fx.Node, fx.Node] = {}  # to such a first value the first that the backward reads
    equal_to: dict[fx.Node, fx.Node] = {}
    for node in joint.in_phase(Phase.FORWARD):
        if not _is_pure(node):
            continue
        # Only calls with the same operator and operands are compared in full.
        firsts_alike = firsts.setdefault((node.target, *(first_equal.get(s, s) for s in node.all_input_nodes)), [])
        first_equal[node] = next((first for first in firsts_alike if _computes_same(first, node, first_equal)), node)
        if first_equal[node] is node:
            firsts_alike.append(node)
        if not is_tensor(node) or is_view(node):
            continue
        shows = [node, *views_of(node)]
        if not returned.isdisjoint(shows) or not all(_is_plain(shown, node) for shown in shows):
            continue
        if first_equal[node] in read:
            equal_to[node] = read[first_equal[node]]
        elif Mark.REMADE in node.meta and first_equal[node] is not node:
            equal_to[node] = first_equal[node]
        elif any(user.meta.get(Mark.PHASE) is Phase.BACKWARD for shown in shows for user in shown.users):
            read[first_equal[node]] = node
    return equal_to


def _is_pure(node: fx.Node) -> bool:
    """Test for values that depend on nothing but a node's arguments, and bind no size that is known only from data.

    This is not known of custom operators.
    """
    if has_side_effect(node) or is_seeded(node) or "unbacked_bindings" in node.meta:
        return False
    target = node.target
    return target is operator.getitem or (
        isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
    )


def _computes_same(node: fx.Node, other: fx.Node, first_equal: Mapping[fx.Node, fx.Node]) -> bool:
    """Return whether two calls of one operator have equal arguments; ``first_equal`` says which values are equal."""
    return _is_same(node.args, other.args, first_equal) and _is_same(node.kwargs, other.kwargs, first_equal)


def _is_same(value: Any, other: Any, first_equal: Mapping[fx.Node, fx.Node]) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, fx.Node):
        return first_equal.get(value, value) is first_equal.get(other, other)
    if isinstance(value, (tuple, list)):
        return len(value) == len(other) and all(_is_same(*pair, first_equal) for pair in zip(value, other, strict=True))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(
            _is_same(item, other[key], first_equal) for key, item in value.items()
        )
    return bool(value == other)


def _is_plain(shown: fx.Node, node: fx.Node) -> bool:
    """Return whether a view has the dtype of its base, without conjugation or negation."""
    if not is_tensor(shown):
        return False
    value, base = shown.meta["val"], node.meta["val"]
    return value.dtype is base.dtype and value.is_conj() == base.is_conj() and value.is_neg() == base.is_neg()
