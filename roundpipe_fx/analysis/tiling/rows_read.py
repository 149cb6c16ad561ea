"""Slices of rows of wide values: the operations that need only the sliced rows.

A loss of ``logits[:, :-1]`` does not read the logits of last tokens, so the operations that compute them can skip these
rows, back to the narrow value from which they are computed. The backward of a slice fills the skipped rows with zeros.
Readers that are proportional to it turn these into zeros or add them to sums, so they can skip the rows too. For two
sequences of four tokens, whose last ones are dropped::

    forward     x[8, 4] ─── mm ──▶ h[8, 64] ── tanh, view ──▶ [2, 4, 64] ── slice ──▶ [2, 3, 64]
    instead     x[6, 4] ─── mm ──▶ h[6, 64] ── tanh, view ──▶ [2, 3, 64]              x is sliced: it is narrow

    backward    [2, 3, 64] ── zeros for last tokens ──▶ [2, 4, 64] ── view, tanh' ──▶ dh[8, 64] ─┬─ mm ──▶ dx[8, 4]
    instead     [2, 3, 64] ── view, tanh' ──▶ dh[6, 64] ─┬─ mm ──▶ dx[6, 4] ── zeros ──▶ [8, 4]  └─ mm ──▶ dw[4, 64]
                                                         └─ mm ──▶ dw[4, 64], from xᵀ[4, 6]

Without this, no tile region would form around a slice: its rows differ from those of its operand.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.dimensions import arguments_on_tile
from roundpipe_fx.analysis.dimensions.labels import same_size
from roundpipe_fx.analysis.tiling.linear import find_proportional
from roundpipe_fx.analysis.tiling.rows import (
    Described,
    Rows,
    described,
    divided_labels,
    elements,
    may_be_divided,
    positions_of,
    rows_among,
)
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, is_tensor, is_view, maker_of

aten = torch.ops.aten

_NARROW = 0.55
"""What is sliced instead has at most this share of the elements of what was sliced."""
_MOST_MEMBERS = 100
"""A slice that more operations could leave rows out for is not of a wide value between narrow ones."""
_MOST_DIMS = 3
"""Largest number of dimensions that make up the rows."""


@dataclass(frozen=True, kw_only=True)
class RowSlice:
    """A slice, and the operations that can skip the rows that it drops.

    Attributes:
        dim: the dimension that it slices.
        gradients: its backward, which puts zeros where rows were left out.
        members: the operations, in graph order.
        narrow: what they read whole, and is to be sliced for them.
        padded: what is made of zeros there, and others read.
        where: by value, where its rows are.
        axis: how many rows are before a row's place along the sliced dimension, how many places there are, and how many
            rows are behind.
        kept: number of places that are not left out.
    """

    node: fx.Node
    dim: int
    gradients: tuple[fx.Node, ...]
    members: tuple[fx.Node, ...]
    narrow: tuple[fx.Node, ...]
    padded: tuple[fx.Node, ...]
    where: Mapping[fx.Node, Rows]
    axis: tuple[int, int, int]
    kept: int

    def split(self, value: fx.Node) -> tuple[int, int, int]:
        """The dimension of a value that is to be sliced, as it divides: its place, and what is before and behind."""
        rows = self.where[value]
        shape = value.meta["val"].shape
        parts = _find_sliced_axis([shape[position] for position in rows], self.axis)
        assert parts is not None
        number, before, behind = parts
        return rows[number], before, behind

    def arguments(self, member: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A member's arguments on the rows that are kept; tensors are the member's."""
        if member.target is operator.getitem:
            return member.args, member.kwargs
        known = described(member)
        assert known is not None
        labels = divided_labels(known, self.where, math.prod(self.axis))
        axis = _find_sliced_axis([known.dimensions.sizes[label] for label in labels], self.axis)
        assert axis is not None
        number, before, behind = axis
        return arguments_on_tile(member, known.dimensions, {labels[number]: before * self.kept * behind})


def find_row_slice(joint: JointGraph, node: fx.Node) -> RowSlice | None:
    """Find a slice of a wide value that narrow ones can be sliced instead of; ``None``: the node is none.

    Args:
        joint: an annotated graph; not changed.
    """
    if not _is_slice(node):
        return None
    known: dict[fx.Node, Described | None] = {}
    dim = _dim_of(node)
    assert isinstance(node.args[0], fx.Node)
    searches = (
        _SliceSearch(joint, node, dim, rows, known) for rows in _candidate_rows(node.args[0].meta["val"].dim(), dim)
    )
    row_slice = next((row_slice for search in searches if (row_slice := search.run()) is not None), None)
    return row_slice if row_slice is not None and _is_kept_in_order(node) else None


def _is_slice(node: fx.Node) -> bool:
    """Return whether a node slices a computed value that nothing else of the forward reads."""
    if node.target is not aten.slice.Tensor or not isinstance(node.args[0], fx.Node):
        return False
    source = node.args[0]
    if node.kwargs or any(isinstance(argument, fx.Node) for argument in node.args[1:]):
        return False
    size, part = elements(source), elements(node)
    alone = all(user is node or user.meta.get(Mark.PHASE) is Phase.BACKWARD for user in source.users)
    return 0 < part < size and alone and source.op == "call_function"


def _dim_of(node: fx.Node) -> int:
    assert isinstance(node.args[0], fx.Node)
    dim = node.args[1] if len(node.args) > 1 else 0
    assert isinstance(dim, int)
    return dim % int(node.args[0].meta["val"].dim())


def _is_kept_in_order(node: fx.Node) -> bool:
    """Return whether nothing depends on how a slice lies in memory, or decides something by it."""
    waiting, seen = [node], {node}
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if user in seen or user.meta.get(Mark.PHASE) is not Phase.FORWARD:
                continue
            seen.add(user)
            if user.target is aten.as_strided.default or Mark.MUST_SAVE in user.meta:
                return False
            # What a comparison finds must not depend on how a matrix product is rounded.
            if is_tensor(user) and not user.meta["val"].is_floating_point():
                return False
            waiting.append(user)
    return True


def _candidate_rows(rank: int, dim: int) -> Iterator[Rows]:
    """Where rows may be, of which the places along a dimension are part."""
    for count in range(1, min(rank, _MOST_DIMS + 1)):
        yield from (rows for rows in itertools.combinations(range(rank), count) if dim in rows)


def _find_sliced_axis(sizes: list[Any], axis: tuple[int, int, int]) -> tuple[int, int, int] | None:
    """Which of some sizes, whose product are the rows, has the sliced dimension, and what else is in it.

    Args:
        sizes: from the outermost on.
        axis: rows before, along and behind the sliced dimension.

    Returns:
        its number, and how many rows are before and behind within it; ``None``: no size has all of it.
    """
    outer, length, inner = axis
    if not all(isinstance(size, int) for size in sizes):
        return None
    # A slice along the middle dimension of rows (4, 7, 2) has axis = (4, 7, 2): 4 rows before, 7 places, 2 behind.
    # Seen from a tensor that has these rows as (28, 2), size 28 holds all of the axis: (0, 4, 1).
    # As (4, 14) it is size 14: (1, 1, 2). As (56,) it is (0, 4, 2).
    for number, size in enumerate(sizes):
        if size != 1 and outer % size == 0:
            outer //= size
            continue
        if size == 1:
            continue
        behind = math.prod(sizes[number + 1 :])
        if size % (outer * length) or inner % behind or size // (outer * length) != inner // behind:
            # All of the sliced dimension has to lie within one size.
            return None
        return number, outer, inner // behind
    return None


class _SliceSearch:
    """The search for values that can leave out rows with one slice, given where rows are.

    Args:
        rows: where rows of what it slices are.
        known: how operations divide, as far as anybody has asked.
    """

    def __init__(
        self, joint: JointGraph, node: fx.Node, dim: int, rows: Rows, known: dict[fx.Node, Described | None]
    ) -> None:
        assert isinstance(node.args[0], fx.Node)
        self.joint, self.node, self.dim, self.known = joint, node, dim, known
        self.source = node.args[0]
        shape = self.source.meta["val"].shape
        before = math.prod(shape[position] for position in rows if position < dim)
        behind = math.prod(shape[position] for position in rows if position > dim)
        self.axis = before, int(shape[dim]), behind
        self.kept = int(node.meta["val"].shape[dim])
        self.where: dict[fx.Node, Rows] = {self.source: rows}
        self.members: set[fx.Node] = set()
        self.narrow: dict[fx.Node, None] = {}
        self.padded: dict[fx.Node, None] = {}
        self.gradients: list[fx.Node] = []

    def run(self) -> RowSlice | None:
        """Find the values that leave out rows; ``None``: one of them cannot."""
        if not self._collect_makers():
            return None
        self.gradients = [other for other in self.joint.in_phase(Phase.BACKWARD) if self._is_gradient(other)]
        # Gradients have the rows of what was sliced; from there the search goes on to their readers.
        self.where.update(dict.fromkeys(self.gradients, self.where[self.source]))
        if not (self._collect_readers() and self._is_closed()):
            return None
        ordered = [node for node in self.joint.graph.nodes if node in self.members]
        backward = [node for node in ordered if node.meta[Mark.PHASE] is Phase.BACKWARD]
        # The backward puts zeros where rows were left out. Leaving them out is right only if every reader is linear in
        # them.
        linear = find_proportional(backward, self.gradients)
        if linear is None or not all(node in linear for node in backward):
            return None
        return RowSlice(
            node=self.node,
            dim=self.dim,
            gradients=tuple(self.gradients),
            members=tuple(ordered),
            narrow=tuple(self.narrow),
            padded=tuple(self.padded),
            where=self.where,
            axis=self.axis,
            kept=self.kept,
        )

    def _is_gradient(self, other: fx.Node) -> bool:
        """Return whether a node is the backward of the slice."""
        if other.target is not aten.slice_backward.default or len(other.args) != 6:
            return False
        _, sizes, dim, *position = other.args
        arguments = [self.node.args[i] if i < len(self.node.args) else default for i, default in _DEFAULTS]
        return (
            list(sizes) == list(self.source.meta["val"].shape)  # type: ignore[arg-type]
            and dim % len(sizes) == self.dim  # type: ignore[operator,arg-type]
            and position == arguments
            and self.node.meta.get("seq_nr") == other.meta.get("seq_nr")
        )

    def _collect_makers(self) -> bool:
        """Take in what makes the slice, back to narrow values."""
        waiting = [self.source]
        # From the slice back to narrow values: everything on the way can leave rows out.
        while waiting:
            value = waiting.pop()
            maker = maker_of(value)
            if maker in self.members:
                continue
            if maker.meta.get(Mark.PHASE) is not Phase.FORWARD or not self._add_member(maker, sums=False):
                return False
            waiting += [other for other in maker.all_input_nodes if other in self.where and other not in self.narrow]
        return True

    def _collect_readers(self) -> bool:
        """Take in what reads the backward of the slice, up to narrow values and sums over rows."""
        # From the gradient forward, up to narrow values (which are padded with zeros again) and sums over rows.
        waiting = list(self.gradients)
        while waiting:
            for user in list(waiting.pop().users):
                if user in self.members:
                    continue
                if user.meta.get(Mark.PHASE) is not Phase.BACKWARD or not self._add_member(user, sums=True):
                    return False
                for value in [user, *user.users] if not is_tensor(user) else [user]:
                    if value not in self.where or not is_tensor(value):
                        continue
                    if self._is_narrow(value):
                        self.padded[value] = None
                    else:
                        waiting.append(value)
        return True

    def _add_member(self, node: fx.Node, sums: bool) -> bool:
        """Take in an operation that works on each row alone; says where rows are of what it reads and makes."""
        if not may_be_divided(node) or len(self.members) >= _MOST_MEMBERS:
            return False
        if node not in self.known:
            self.known[node] = described(node)
        known = self.known[node]
        if known is None:
            return False
        wanted = divided_labels(known, self.where, math.prod(self.axis))
        if not wanted or set(wanted) & known.dimensions.mixed:
            return False
        if _find_sliced_axis([known.dimensions.sizes[label] for label in wanted], self.axis) is None:
            return False
        items = {user for user in node.users if user.target is operator.getitem} if not is_tensor(node) else set()
        for value, labels in known.pairs:
            position = rows_among(labels, wanted)
            if value is None:
                continue
            if isinstance(position, tuple) and not same_size(positions_of(value, position), math.prod(self.axis)):
                return False
            is_made = value is node or value in items
            # In the forward no sums are allowed: a sum over rows that nobody reads would change.
            if position is None or (position is False and (value in self.where or (is_made and not sums))):
                return False
            if position is False:
                continue
            assert isinstance(position, tuple)
            if self.where.setdefault(value, position) != position:
                return False
            if is_made:
                continue
            shape = value.meta["val"].shape
            if self._is_narrow(value) and value not in self.members:
                if _find_sliced_axis([shape[dim] for dim in position], self.axis) is None:
                    return False
                self.narrow[value] = None
        self.members |= {node, *items}
        return True

    def _is_narrow(self, value: fx.Node) -> bool:
        return elements(value) <= _NARROW * elements(self.source)

    def _is_closed(self) -> bool:
        """Return whether no other operation reads the sliced values, and every wide operand is sliced too."""
        inside = {self.node, *self.members}
        if not self.padded.keys().isdisjoint(self.narrow) or not self.members.isdisjoint(self.narrow):
            return False
        # Every reader of a value with fewer rows is one of the members, or the slice itself.
        for member in self.members:
            for source in member.all_input_nodes:
                if source in self.where and source not in (*self.members, *self.gradients, *self.narrow):
                    return False
            sums = is_tensor(member) and member not in self.where
            if member not in self.padded and not sums and not all(user in inside for user in member.users):
                return False
        positions = {value: [value.meta["val"].shape[dim] for dim in self.where[value]] for value in self.padded}
        return all(_find_sliced_axis(sizes, self.axis) is not None for sizes in positions.values()) and not any(
            is_view(value) for value in self.padded
        )


_DEFAULTS: tuple[tuple[int, Any], ...] = ((2, None), (3, None), (4, 1))
"""Places of a slice's start, end and step, with what they are if they are not given."""
