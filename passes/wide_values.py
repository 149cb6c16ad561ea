"""wide_values: a wide value that is cheap to compute from narrow ones is computed anew for each of its readers.

The mask of a padded batch has a value for each pair of tokens, and is made of one for each token. All layers read it,
so it would be held from the first layer's forward to that layer's backward. Made for each attention, it is a value of
that layer like any other: it dies when it has been read, is recomputed in the backward, and tiles compute the rows of
it that they read::

    mask = (columns <= rows) & tokens                   mask = (columns <= rows) & tokens
    a = attention(x, where(mask, 0, -inf))              a = attention(x, where(mask, 0, -inf))
    b = attention(a, where(mask, 0, -inf))              mask_1 = (columns <= rows) & tokens
                                                        b = attention(a, where(mask_1, 0, -inf))

Where everything is saved, one value serves all readers (:mod:`roundpipe_fx.passes.cse`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from roundpipe_fx.analysis.cost import tensor_bytes
from roundpipe_fx.analysis.fusion import is_fusible
from roundpipe_fx.ir.graph_edit import insert_call, views_of
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, is_tensor, is_view, tensor_values

_NARROW = 8
"""A value is narrow for a wide one if it has at most one in so many of its bytes."""
_WORTH = 0.001
"""Share of the bytes that the backward reads of the forward which a value must have to be computed anew."""


def compute_for_each_reader(joint: JointGraph) -> JointGraph:
    """Compute wide values anew for readers between which there is other work. Runs before annotate.

    Results are bitwise equal: the same operations have the same operands.
    """
    late = joint.find_tangent_dependents()
    forward = [n for n in joint.computed() if n not in late and n.meta.get("partitioner_tag") != "is_backward"]
    order = {node: position for position, node in enumerate(forward)}
    busy = [position for node, position in order.items() if not is_view(node) and not _is_pointwise(node)]
    least = _WORTH * _bytes([node for node in forward if any(_is_late(user, order) for user in node.users)])
    returned = {node for node in joint.outputs if isinstance(node, fx.Node)}
    # The last first: when its turn comes, nothing reads a value on behalf of one that was computed anew.
    for value in reversed(forward):
        if not value.users or not is_tensor(value) or is_view(value) or _bytes([value]) < least:
            continue
        if not returned.isdisjoint([value, *views_of(value)]) or not _is_cheap(value):
            continue
        readers = _readers(value, order, busy)
        if len(readers) > 1:
            for group in readers:
                _give_copy(value, group)
            _drop_unread([value, *views_of(value)])
    return joint


def _bytes(nodes: Iterable[fx.Node]) -> int:
    return tensor_bytes([value for node in nodes for value in tensor_values(node)])


def _is_late(reader: fx.Node, forward: Mapping[fx.Node, int]) -> bool:
    return reader not in forward and reader.op != "output"


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and is_fusible(node)


def _is_cheap(value: fx.Node) -> bool:
    """Test for a value that pointwise operations compute from narrow ones."""
    most = _bytes([value]) // _NARROW
    pending = [value]
    while pending:
        node = pending.pop()
        if node is value or not _is_narrow(node, most):
            if not is_tensor(node) or not (is_view(node) or _is_pointwise(node)):
                return False
            pending += node.all_input_nodes
    return True


def _is_narrow(node: fx.Node, most: int) -> bool:
    return not tensor_values(node) or _bytes([node]) <= most


@dataclass(frozen=True)
class _ReaderGroup:
    """Readers that share a copy.

    Attributes:
        first: the first of them, before which the copy is computed.
        all: they, and readers in the backward that differentiate them; each with the operand that it reads, which is
            the value or a view of it.
    """

    first: fx.Node
    all: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)


def _readers(value: fx.Node, order: Mapping[fx.Node, int], busy: Sequence[int]) -> list[_ReaderGroup]:
    """The readers of a value in groups, between which there is other work; none if they cannot be told apart."""
    reads = [(user, source) for source in (value, *views_of(value)) for user in source.users if not is_view(user)]
    groups: list[_ReaderGroup] = []
    by_number: dict[int, _ReaderGroup] = {}
    before = -1
    for reader, source in sorted((read for read in reads if read[0] in order), key=lambda read: order[read[0]]):
        if not groups or bisect_right(busy, order[reader] - 1) > bisect_left(busy, before):
            groups.append(_ReaderGroup(reader))
        before = order[reader]
        groups[-1].all.append((reader, source))
        by_number[reader.meta.get("seq_nr", -1)] = groups[-1]
    for reader, source in reads:
        if reader not in order:
            # Autograd gives an operation and those that differentiate it one number.
            group = by_number.get(reader.meta.get("seq_nr", -2))
            if group is None:
                return []
            group.all.append((reader, source))
    return groups


def _give_copy(value: fx.Node, readers: _ReaderGroup) -> None:
    """Compute a value anew before its readers, which read the copy."""
    most = _bytes([value]) // _NARROW
    copies: dict[fx.Node, fx.Node] = {}

    def copy_of(node: fx.Node) -> fx.Node:
        """The copy of a wide value or a view of it, or a narrow one itself."""
        if node not in copies:
            if node is not value and _is_narrow(node, most):
                return node
            sources = {source: copy_of(source) for source in node.all_input_nodes}
            copies[node] = _copy(node, sources, readers.first)
        return copies[node]

    for reader, source in readers.all:
        reader.replace_input_with(source, copy_of(source))


def _copy(node: fx.Node, sources: Mapping[fx.Node, fx.Node], reader: fx.Node) -> fx.Node:
    args, kwargs = fx.map_arg((node.args, node.kwargs), sources.__getitem__)
    copy = insert_call(reader, node.target, *args, **kwargs)  # with a storage of its own, or that of a copy
    copy.meta[Mark.REMADE] = True
    return copy


def _drop_unread(nodes: Iterable[fx.Node]) -> None:
    """Erase what nothing reads, and what it alone reads."""
    for node in nodes:
        if not node.users and node.op == "call_function":
            sources = node.all_input_nodes
            node.graph.erase_node(node)
            _drop_unread(sources)
