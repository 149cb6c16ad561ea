"""Growth of a tile region: from one wide value on, its makers and readers join that work on each row alone.

From h in an MLP, with its rows in dimension 0; the region ends at values that are narrow::

    x[96, 4] ──▶ mm ──▶ h[96, 64] ──▶ tanh ──▶ a[96, 64] ──▶ mm ──▶ y[96, 4]
      narrow     ▲          wide                  wide       ▲        narrow
                 w1[4, 64], read whole by every tile         w2[64, 4]

The operands and results of an operation share its labels, so the rows of one give the rows of the others. The backward
joins the same way: of dw2 = aᵀ·dy, rows are dimension 1 of aᵀ and 0 of dy, and dw2 has none: it is the sum over tiles.
A region saves the bytes of h, a and their gradients, less those of values with rows at its border: x, xᵀ, y and dy.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from roundpipe_fx.analysis.tiling.region_kind import RegionKind
from roundpipe_fx.analysis.tiling.rows import (
    Described,
    Rows,
    described,
    divided_labels,
    elements,
    is_adjacent,
    may_be_divided,
    rows_among,
)
from roundpipe_fx.ir.graph_edit import views_of
from roundpipe_fx.ir.joint_graph import Mark, Phase, is_tensor, is_view, maker_of, viewed

_AS_WIDE = 0.6
"""Values with at least this share of the widest value's width belong to a region."""
_MOST_MEMBERS = 400
"""What is larger is no run of operations between narrow values, but most of a model."""


@dataclass(kw_only=True)
class Growth:
    """A region that grows from a value whose rows are known.

    Attributes:
        start: where its rows are.
        rows: their number; a divisor of the number of positions there.
        kind: what is wide, and where the region may end.
        order: the nodes of the graph, with their positions.
        described: how operations divide, as far as anybody has asked.
        sizes: number of elements by node, as far as anybody has asked.
        taken: what other regions have.
        tangential: what depends on incoming gradients.
        where: by value, where its rows are.
        undivided: values of which each tile needs all, or which are sums over tiles.
        whole: those of them that do the same for each tile.
        sums: whether values of the forward, other than scalars, are sums over tiles.
        saved: bytes that need no longer exist at once; at most 0 if there is no use in tiles.
        coarser: smaller numbers of rows with which operations would join that were refused.
    """

    widest: fx.Node
    start: Rows
    rows: int
    kind: RegionKind
    order: Mapping[fx.Node, int]
    described: dict[fx.Node, Described | None]
    sizes: dict[fx.Node, int]
    taken: set[fx.Node]
    tangential: set[fx.Node]
    where: dict[fx.Node, Rows] = field(default_factory=dict)
    undivided: set[fx.Node] = field(default_factory=set)
    members: set[fx.Node] = field(default_factory=set)
    whole: set[fx.Node] = field(default_factory=set)
    sums: bool = False
    saved: float = 0.0
    coarser: set[int] = field(default_factory=set)

    def grow(self, returned: set[fx.Node]) -> bool:
        """Grow as far as operations work on each row alone; whether that is a region."""
        self.where[self.widest] = self.start
        refused: set[fx.Node] = set()
        # Flood fill from the widest value: wide values spread to their makers and readers; narrow ones end the region.
        waiting = [self.widest]
        while waiting:
            value = waiting.pop()
            for node in self._neighbours(value):
                # A refusal is final: positions of rows are added and never changed, and each one allows less.
                if node in self.members or node in refused:
                    continue
                if not self.join(node):
                    refused.add(node)
                    continue
                waiting += [other for other in self._values(node) if self._is_wide(other)]
        # A region has to be closed: what runs between its members has to run inside the loop too.
        if self.widest not in self.members or not self.close():
            return False
        self._trace_back()
        self.weigh(returned)
        return self.saved > 0

    def join(self, node: fx.Node) -> bool:
        """Take a node in if it works on each row alone; says where the rows of what it reads and makes are."""
        if not may_be_divided(node) or node in self.taken:
            return False
        if len(self.members) >= _MOST_MEMBERS:
            return False
        if node not in self.described:
            self.described[node] = described(node)
        known = self.described[node]
        if known is None:
            return False
        wanted = divided_labels(known, self.where, self.rows)
        positions = self._positions(node, known, wanted)
        if positions is None:
            self._note_coarser(known, wanted)
            return False
        if not self.kind.sums_activations and any(
            position is False and self._is_sum_of_activations(value, node) for value, position in positions.items()
        ):
            return False
        for value, position in positions.items():
            if isinstance(position, tuple):
                self.where[value] = position
            else:
                self.undivided.add(value)
        self.members.add(node)
        # Results of an operation that returns several are items: members too.
        if not is_tensor(node):
            self.members.update(user for user in node.users if user.target is operator.getitem)
        return True

    def _positions(
        self, node: fx.Node, known: Described, wanted: tuple[int, ...]
    ) -> dict[fx.Node, Rows | Literal[False]] | None:
        """Find where an operation's operands and results have their rows; ``False``: they have none.

        Returns:
            ``None``: the operation does not work on each row alone, or values have rows elsewhere.
        """
        # `mixed`: dimensions along which the operation is not independent (a softmax's, a norm's). Rows must not lie in
        # them.
        if not wanted or set(wanted) & known.dimensions.mixed:
            return None
        positions: dict[fx.Node, Rows | Literal[False]] = {}
        # For each operand and result: where the rows are (a tuple), that it has none of them (False: needed whole), or
        # that they are cut in some other way (None: no region).
        for value, labels in known.pairs:
            position = rows_among(labels, wanted)
            if value is None:
                continue
            if position is None or (position is False and (value in self.where or self._is_halfway(value, node))):
                return None
            # A value has its rows in one position only, and is either divided or needed whole.
            if positions.setdefault(value, position) != position:
                return None
            if position is False:
                continue
            if value in self.undivided or self.where.get(value, position) != position or not _has_static_strides(value):
                return None
        return positions

    def _note_coarser(self, known: Described, wanted: tuple[int, ...]) -> None:
        """Note with how many rows, fewer than now, an operation would divide that was refused."""
        for count in range(1, len(wanted)):
            outer = wanted[:count]
            product = math.prod(known.dimensions.sizes[label] for label in outer)
            if (
                isinstance(product, int)
                and 1 < product < self.rows
                and self.rows % product == 0
                and not set(outer) & known.dimensions.mixed
                and not any(rows_among(labels, outer) is None for _, labels in known.pairs)
            ):
                self.coarser.add(product)

    def _is_sum_of_activations(self, value: fx.Node, node: fx.Node) -> bool:
        """Return whether a value without rows is a result of an operation, of the forward or wide."""
        return maker_of(value) is node and (node.meta[Mark.PHASE] is Phase.FORWARD or self._is_wide(value))

    def _is_halfway(self, value: fx.Node, node: fx.Node) -> bool:
        """Return whether a sum over tiles, of what a node reads or makes, would be read before all tiles are added."""
        # A sum over the tiles (a bias gradient) is complete only after the loop. Readers in the same phase would see
        # part of it.
        phase = node.meta[Mark.PHASE]
        if maker_of(value) is not node:
            return value in self.members and value not in self.whole and value.meta[Mark.PHASE] is phase
        return any(user in self.members and user.meta[Mark.PHASE] is phase for user in value.users)

    def close(self) -> bool:
        """Take in what lies between members of one phase; whether all of it works row by row."""
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            between = _between([node for node in self.members if node.meta[Mark.PHASE] is phase], self.order)
            if not all(node in self.members or self.join(node) for node in between):
                return False
        return True

    def _trace_back(self) -> None:
        """Take in the way from one scalar incoming gradient to the region: its scaling, and spreading over rows."""
        joined = True
        while joined:
            # The mean's gradient, 1 / n, is scaled and expanded before it is wide: these few operations belong to the
            # loop, so the wide gradient never exists. Each round goes one operation up, until nothing joins.
            joined = False
            backward = [node for node in self.members if node.meta[Mark.PHASE] is Phase.BACKWARD]
            for source in [source for node in backward for source in node.all_input_nodes]:
                if source in self.members or source not in self.tangential or source.op == "placeholder":
                    continue
                if source in self.where:
                    joined |= self._elements(source) == self.rows and self.join(source)
                elif _is_scaling(source):
                    self.members.add(source)
                    self.whole.add(source)
                    joined = True

    def _neighbours(self, value: fx.Node) -> Iterator[fx.Node]:
        maker = maker_of(value)
        if maker.op == "call_function":
            yield maker
        yield from value.users

    def _values(self, node: fx.Node) -> Iterator[fx.Node]:
        known = self.described[node]
        assert known is not None
        for value, _ in known.pairs:
            if value is not None and value in self.where:
                yield value

    def _is_wide(self, value: fx.Node) -> bool:
        return self._width(value) >= _AS_WIDE * self._width(self.widest)

    def _width(self, value: fx.Node) -> int:
        return self.kind.width(value, self._elements(value))

    def _elements(self, value: fx.Node) -> int:
        if value not in self.sizes:
            self.sizes[value] = elements(value)
        return self.sizes[value]

    def weigh(self, returned: set[fx.Node]) -> None:
        """Count the bytes that need no longer exist at once.

        None if what is read or returned by rows is wide too, or tiles of it are not one part of a dimension.
        """
        # A sum over tiles is rounded per tile, which users are told of.
        self.sums = any(
            node.meta[Mark.PHASE] is Phase.FORWARD and node not in self.where and self._elements(node) > 1
            for node in self.members - self.whole
        )
        wide = {
            node: node.meta["val"].numel() * node.meta["val"].dtype.itemsize
            for node in self.members
            if is_tensor(node) and not is_view(node) and self._is_wide(node) and node in self.where
        }
        made = {other for other in self.members}
        # Values that cross the region's border as rows: they exist whole beside the loop.
        outside = {
            value
            for node in self.members
            for value in (*node.all_input_nodes, node)
            if value in self.where
            and (value not in made or value in returned or any(user not in made for user in value.users))
        }
        limit = self.kind.border * self._width(self.widest)
        floats = [v for v in outside if v.meta["val"].is_floating_point() and self._width(v) > limit]
        known = {v for v in floats if _exists_anyway(v, returned)}
        if any(v not in known for v in floats) or not all(is_adjacent(self.where[v]) for v in outside):
            self.saved = 0.0
            return
        # Bytes of wide members that never exist whole, minus what is made whole at the border.
        self.saved = float(sum(size for node, size in wide.items() if node not in known)) - sum(
            v.meta["val"].numel() * v.meta["val"].dtype.itemsize for v in outside if v not in known
        )
        if self.kind.counts_bytes:
            self.saved += max(node.meta.get(Mark.WORKSPACE, 0) for node in self.members)


def _exists_anyway(value: fx.Node, returned: Collection[fx.Node]) -> bool:
    """Return whether the caller gives a value, or is given it, as it is or in another shape."""
    size = elements(value)
    base = viewed(value)
    if elements(base) != size:
        return False
    of_base = (base, *views_of(base))
    return base.op == "placeholder" or any(view in returned and elements(view) == size for view in of_base)


def _is_scaling(node: fx.Node) -> bool:
    """Return whether a node makes a single number of others."""
    return (
        is_tensor(node)
        and may_be_divided(node)
        and all(elements(value) == 1 for value in (node, *node.all_input_nodes))
    )


def _has_static_strides(value: fx.Node) -> bool:
    tensor = value.meta.get("val")
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))
    )


def _between(members: Iterable[fx.Node], order: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Nodes of the same phase on a way from a member to a member, in graph order.

    Args:
        order: the nodes of the graph, with their positions. Only those between the first member and the last are
            looked at: a model has many regions, and each of them is a small part of it.
    """
    ordered = sorted(members, key=order.__getitem__)
    if not ordered:
        return []
    phase = ordered[0].meta[Mark.PHASE]
    inside = set(ordered)
    after: set[fx.Node] = set()
    # Between the first and the last member in graph order: reached from a member, and reaching one.
    nodes = [ordered[0]]
    while nodes[-1] is not ordered[-1]:
        nodes.append(nodes[-1].next)
    nodes = [node for node in nodes if node.meta.get(Mark.PHASE) is phase]
    for node in nodes:
        if any(source in inside or source in after for source in node.all_input_nodes):
            after.add(node)
    before: set[fx.Node] = set()
    for node in reversed(nodes):
        if any(user in inside or user in before for user in node.users):
            before.add(node)
    return [node for node in nodes if node in after and node in before and node not in inside]
