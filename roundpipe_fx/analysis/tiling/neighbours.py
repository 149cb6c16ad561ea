"""Neighbours of a tile region: operations before and behind it join where fewer bytes then exist beside its loops.

A region ends at narrow values, wherever these are. In a gated MLP behind a norm, in a transformer's backward::

    while the loop runs                            values of the hidden state's size
    as it was found                                x, norm(x), dy, d norm(x) by the gate, d norm(x) by the other product
    with the norm, its backward and the sums       x, dy, dx

Both borders are moved by a minimum cut. Candidates are the operations next to the region that work on each of its rows
alone, on values no larger than those at its border. Behind the region, each value costs its bytes if it exists by then
and is still read; before it, if it exists already. Of several cheapest cuts, the one with the fewest operations is
taken. ::

    … ── dh·w1 ──▶ a ──┐
    … ── dh·w2 ──▶ b ──┴─ add ──▶ c ──▶ norm's backward ──▶ d ──┐
                                                                add ──▶ dx
    dy, read by the region ─────────────────────────────────────┘

    behind the region     a, b, dy     c, dy     d, dy     dx: the cheapest

What the backward reads of the forward costs nothing here: its loop recomputes it for each tile.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import fx

from roundpipe_fx.analysis.minimum_cut import SINK, SOURCE, UNCUTTABLE, Arc, choose_unit, minimum_cut
from roundpipe_fx.analysis.tiling.growth import Growth
from roundpipe_fx.analysis.tiling.rows import elements
from roundpipe_fx.ir.joint_graph import Mark, Phase, is_tensor, maker_of, node_outputs, readers_behind_views, viewed

_MOST_CANDIDATES = 64
"""The cheapest border is near: a norm, its backward, and a few sums lie before it."""


def take_in_neighbours(growth: Growth, returned: set[fx.Node]) -> Growth:
    """Move a region's borders to where the fewest bytes exist beside its loops.

    Args:
        growth: a region that has grown; not changed.
        returned: what the graph returns.

    Returns:
        the region with its neighbours; the same one if nothing is gained.
    """
    for phases in ((Phase.FORWARD, Phase.BACKWARD), (Phase.BACKWARD,)):
        extended = growth
        for phase in phases:
            extended = _with_neighbours(extended, phase)
        if extended is growth or not extended.close() or _is_read_whole(extended, growth):
            continue
        extended.weigh(returned)
        if extended.saved > 0:
            return extended
    return growth


def _with_neighbours(growth: Growth, phase: Phase) -> Growth:
    """Let the chosen operations of a phase join, those behind the region and those before it."""
    core = {node for node in growth.members - growth.whole if node.meta[Mark.PHASE] is phase}
    extended = growth
    for behind in (True, False) if core else ():
        candidates, spread = _spread(extended, core, behind)
        joining = _choose(core, candidates, growth, behind) if candidates else set[fx.Node]()
        if joining:
            made = {value for node in joining for value in node_outputs(node)}
            extended = dataclasses.replace(spread, members=extended.members | joining | made)
            _join_recomputed(extended)
    return extended


def _join_recomputed(growth: Growth) -> None:
    """Let operations of the backward join that wait for no gradient, and make what members read."""
    waiting = sorted(growth.members, key=growth.order.__getitem__)
    while waiting:
        for maker in _makers(waiting.pop()):
            is_recomputed = maker.meta[Mark.PHASE] is Phase.BACKWARD and maker not in growth.tangential
            if is_recomputed and maker not in growth.members and growth.join(maker):
                waiting.append(maker)


def _is_read_whole(extended: Growth, growth: Growth) -> bool:
    """Return whether the backward, outside of the loops, reads what has joined in the forward, and nothing else does.

    Such a value would exist as a whole again, or the whole loop would run once more for it.
    """
    return any(
        {user.meta.get(Mark.PHASE) for user in node.users if user not in extended.members} == {Phase.BACKWARD}
        for node in extended.members - growth.members
        if node.meta[Mark.PHASE] is Phase.FORWARD and node in extended.where
    )


def _spread(growth: Growth, core: Collection[fx.Node], behind: bool) -> tuple[list[fx.Node], Growth]:
    """Find the operations before or behind a region that work on each row alone, and on no wider values.

    Returns:
        these, and a copy of the region that knows where their rows are.
    """
    copy = dataclasses.replace(
        growth,
        # Fewer bytes are not worth activations that are sums over tiles, which each tile rounds.
        kind=dataclasses.replace(growth.kind, sums_activations=False),
        where=dict(growth.where),
        undivided=set(growth.undivided),
        members=set(growth.members),
        coarser=set(),
    )
    phase = next(iter(core)).meta[Mark.PHASE]

    def crosses(value: fx.Node) -> bool:
        others = value.users if behind else [maker_of(value)]
        return any(other not in core and other.meta.get(Mark.PHASE) is phase for other in others)

    touched = {value for node in core for value in (node_outputs(node) if behind else node.all_input_nodes)}
    limit = max((elements(value) for value in touched if value in growth.where and crosses(value)), default=0)
    available = growth.members.union(*(node.all_input_nodes for node in growth.members))
    waiting, seen = deque(sorted(core, key=growth.order.__getitem__)), set(core)
    candidates: list[fx.Node] = []
    while waiting and len(candidates) < _MOST_CANDIDATES:
        node = waiting.popleft()
        for other in _readers(node) if behind else _makers(node):
            if other in seen or other.meta.get(Mark.PHASE) is not phase:
                continue
            seen.add(other)
            # What is as wide as inside would lead into the next region, and through the whole model.
            if any(elements(value) > limit for value in (*other.all_input_nodes, *node_outputs(other))):
                continue
            # A whole value of the forward would be read where none is now.
            if not available.issuperset(value for value in other.all_input_nodes if _is_saved(value, other)):
                continue
            if other not in copy.members and copy.join(other) and not _sums_in_float16(other, copy):
                candidates.append(other)
                waiting.append(other)
    return candidates, dataclasses.replace(copy, kind=growth.kind)


def _sums_in_float16(node: fx.Node, growth: Growth) -> bool:
    """Return whether an operation is a sum over tiles of float16, to which each tile's part would be rounded."""
    made = [value for value in node_outputs(node) if is_tensor(value) and value not in growth.where]
    return any(value.meta["val"].dtype is torch.float16 for value in made)


def _choose(core: Collection[fx.Node], candidates: Sequence[fx.Node], growth: Growth, behind: bool) -> set[fx.Node]:
    """Choose the candidates that join: those on the source's side of the cut, which is the region's."""
    phase, order = next(iter(core)).meta[Mark.PHASE], growth.order
    first, last = min(order[node] for node in core), max(order[node] for node in core)
    vertex = {**dict.fromkeys(core, SOURCE), **{node: number for number, node in enumerate(candidates, 2)}}
    related = _find_related(core, candidates, growth, behind)
    # What is between a candidate and the region joins with it.
    arcs: list[Arc] = [
        (vertex[node], vertex.get(other, SINK), UNCUTTABLE)
        for node in candidates
        for other in (_makers(node) if behind else _readers(node))
        if other in related
    ]
    touched = {value for node in vertex for value in (*node_outputs(node), *node.all_input_nodes) if is_tensor(value)}
    values = sorted({viewed(value) for value in touched}, key=order.__getitem__)
    values = [
        value for value in values if elements(value) and value.op == "call_function" and value.meta[Mark.PHASE] is phase
    ]
    sizes = [value.meta["val"].numel() * value.meta["val"].dtype.itemsize for value in values]
    unit = choose_unit(sizes)

    def is_later(reader: fx.Node) -> bool:
        """Return whether an operation runs behind the border, or may, and does not join."""
        if reader in vertex or reader.op == "output":
            return reader not in vertex
        if reader.meta.get(Mark.PHASE) is not phase:
            return False  # the planner chooses what the forward saves
        return (
            (reader in related or order[reader] > last) if behind else (reader not in related and order[reader] > first)
        )

    for number, (value, size) in enumerate(zip(values, sizes, strict=True), len(candidates) + 2):
        maker = vertex.get(maker_of(value), SOURCE if behind else SINK)
        # Behind the region a value exists if its maker is inside or before, and costs its bytes if it is still read.
        # Before the region, one costs its bytes if it is read inside or later, and its maker does not join.
        arcs.append((maker, number, size // unit) if behind else (number, maker, size // unit))
        if not behind and maker > SINK and any(map(is_later, readers_behind_views(value))):
            arcs.append((maker, SINK, size // unit))  # read later, so it exists as well if its maker joins
        for reader in readers_behind_views(value):
            if reader in vertex:
                at = vertex[reader]
            elif is_later(reader):
                at = SINK if behind else SOURCE
            else:
                continue
            arcs.append((number, at, UNCUTTABLE) if behind else (at, number, UNCUTTABLE))
    arcs = [arc for arc in arcs if arc[0] != arc[1] and arc[1] != SOURCE and arc[0] != SINK]
    _, joining = minimum_cut(arcs, len(candidates) + len(values) + 2) if arcs else (0, set[int]())
    return {node for node in candidates if vertex[node] in joining}


def _find_related(
    core: Collection[fx.Node], candidates: Collection[fx.Node], growth: Growth, behind: bool
) -> set[fx.Node]:
    """Find what depends on a region, or what it depends on, as far as its candidates are."""
    involved = sorted([*core, *candidates], key=growth.order.__getitem__)
    related = set(core)
    node, end = (involved[0], involved[-1]) if behind else (involved[-1], involved[0])
    # In graph order each operation comes after what it reads, so one pass suffices.
    while True:
        if not related.isdisjoint(node.all_input_nodes if behind else node.users):
            related.add(node)
        if node is end:
            return related
        node = node.next if behind else node.prev


def _is_saved(value: fx.Node, reader: fx.Node) -> bool:
    """Return whether a reader of the backward reads a value with rows of the forward."""
    return (
        reader.meta[Mark.PHASE] is Phase.BACKWARD
        and value.op == "call_function"
        and value.meta[Mark.PHASE] is Phase.FORWARD
        and elements(value) > 1
    )


def _makers(node: fx.Node) -> Iterator[fx.Node]:
    for value in node.all_input_nodes:
        maker = maker_of(value)
        if maker.op == "call_function":
            yield maker


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for value in node_outputs(node):
        yield from (user for user in value.users if user.op == "call_function")
