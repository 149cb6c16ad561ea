"""segments: the runs of forward nodes between narrow places of the graph, and the backward nodes that belong to them.

A *cut* is a position in the forward order; its *width* is the bytes of computed values that live across it
(parameters and other graph inputs are available everywhere and do not count). Between two consecutive operations that
do arithmetic (matrix products, convolutions) only the narrowest position is considered, so a segment always has work.

Cuts are taken narrowest first: within a range the narrowest candidate and all within a quarter of it become cuts, where
values that pass over the whole range do not count; a range that still has more than a quarter of the forward's cost is
cut recursively. A transformer is thus cut at its residual stream, twice per block; a model that ends in a narrow head
is first cut before its head, then like any other; the inside of a U-Net is cut although its skips make every position
inside wider than those outside.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from roundpipe_fx.analysis.fusion import is_in_kernel
from roundpipe_fx.ir.fingerprint import fingerprint
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    has_side_effect,
    input_nodes,
    is_seeded,
    is_view,
    readers_behind_views,
    storages,
    tensor_values,
)
from roundpipe_fx.ir.segment import Segment
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.torch_private import size_hint

_NEAR_NARROWEST = 1.25
_LARGEST_SHARE = 1 / 4


@dataclass(frozen=True)
class _Life:
    """When the storage of a computed value is allocated and last read, as positions in the forward order."""

    birth: int
    death: int
    size: int


def cut_segments(
    joint: JointGraph,
    required_cuts: Sequence[int] = (),
    updates_whole: bool = False,
    only_starts: Sequence[int] | None = None,
    fused: bool = False,
) -> tuple[JointGraph, list[Segment]]:
    """Mark every computing node with its segment.

    Args:
        required_cuts: positions in the forward order before which a segment must begin (stage names of the user).
        updates_whole: whether an input that is updated must be read and updated in one segment, unless a required cut
            is between: a stage can then run for several microbatches before the next one does.
        only_starts: positions before which segments begin, and nowhere else; a cut must not be inside a tuple.
            ``required_cuts`` and ``updates_whole`` are then ignored.
        fused: whether a compiler fuses operations. A segment then begins between kernels: a value that takes no memory
            inside of one would be written only to cross a cut.

    Returns:
        the graph, and the segments in forward order.
    """
    forward = joint.in_phase(Phase.FORWARD)
    lives = _lives(forward)
    widths = _widths(len(forward), lives)
    if only_starts is not None:
        cuts = [position - 1 for position in only_starts]
    else:
        # Another graph of the same model was cut before: the same operations begin the segments here.
        whole = _updates(joint, forward) if updates_whole else []
        inside = _covered(_in_kernels(forward), len(forward)) if fused else [False] * len(forward)
        cuts = _narrow_cuts(forward, lives, widths, inside)
        # Between the first reader of a buffer and its new value no cut is allowed where updates have to stay in one
        # stage.
        cuts = [cut for cut in cuts if not any(a <= cut < b for a, b in whole)]
        cuts = sorted({*cuts, *(position - 1 for position in required_cuts if position > 0)})
    starts = [0, *(cut + 1 for cut in cuts)]
    index = 0
    for position, node in enumerate(forward):
        # Nodes in order get the number of the segment that they fall into.
        while index + 1 < len(starts) and position >= starts[index + 1]:
            index += 1
        node.meta[Mark.SEGMENT] = index
    _assign_backward(joint, len(starts) - 1)
    return joint, _segments(joint, [0, *(widths[cut] for cut in cuts)])


def _updates(joint: JointGraph, forward: list[fx.Node]) -> list[tuple[int, int]]:
    """For each input that is updated, the positions of its first reader and of the node that computes its new value."""
    position = {node: index for index, node in enumerate(forward)}
    primals, outputs = joint.primals, joint.outputs
    updates = []
    for output, primal in joint.updates.items():
        read = [position[user] for user in primals[primal].users if user in position]
        if read and outputs[output] in position:
            updates.append((min(read), position[outputs[output]]))
    return updates


def _lives(forward: list[fx.Node]) -> list[_Life]:
    """Lifetime of every storage that the forward allocates."""
    birth: dict[int, int] = {}
    death: dict[int, int] = {}
    size: dict[int, int] = {}
    # A storage is alive from its maker to the last reader of any view of it.
    for position, node in enumerate(forward):
        for source in input_nodes(node):
            for storage in storages(source):
                if storage in birth:
                    death[storage] = position
        if is_view(node):
            continue
        for value in tensor_values(node):
            untyped = value.untyped_storage()
            if value.layout is torch.strided and untyped._cdata not in birth:
                birth[untyped._cdata] = death[untyped._cdata] = position
                size[untyped._cdata] = size_hint(untyped.nbytes())
    return [_Life(birth[storage], death[storage], size[storage]) for storage in birth]


def _in_kernels(forward: list[fx.Node]) -> list[tuple[int, int]]:
    """For values that a compiler keeps inside its kernels, the positions of their makers and of their last readers."""
    position = {node: index for index, node in enumerate(forward)}
    opaque = [index for index, node in enumerate(forward) if not is_in_kernel(node) and not is_view(node)]
    ranges = []
    for first, node in enumerate(forward):
        last = max((position[user] for user in readers_behind_views(node) if user in position), default=first)
        # A value stays inside a kernel if no opaque operation lies between its maker and its last reader.
        if is_in_kernel(node) and bisect_right(opaque, last) == bisect_left(opaque, first):
            ranges.append((first, last))
    return ranges


def _covered(ranges: Iterable[tuple[int, int]], count: int) -> list[bool]:
    """For each position whether a cut after it is inside a range, given by its first and last positions."""
    # Difference array: +1 where a range begins, -1 where it ends; the running sum is the number of ranges over a
    # position.
    change = [0] * (count + 1)
    for first, last in ranges:
        change[first] += 1
        change[last] -= 1
    return [depth > 0 for depth in itertools.accumulate(change[:count])]


def _widths(count: int, lives: list[_Life]) -> list[int]:
    """Width of the cut after each forward position."""
    change = [0] * (count + 1)
    for life in lives:
        change[life.birth] += life.size
        change[life.death] -= life.size
    widths, live = [], 0
    # Width of a cut behind position p: bytes born at or before p and not dead by then.
    for position in range(count):
        live += change[position]
        widths.append(live)
    return widths


def _narrow_cuts(forward: list[fx.Node], lives: list[_Life], widths: list[int], inside_kernel: list[bool]) -> list[int]:
    candidates = _candidates(forward, widths, inside_kernel)
    elapsed = [0.0]
    for node in forward:
        elapsed.append(elapsed[-1] + _forward_seconds(node))
    limit = elapsed[-1] * _LARGEST_SHARE
    cuts: list[int] = []
    # Recursion with a stack of ranges (low, high) between cuts. The whole forward is always divided, a part only if it
    # costs more than a quarter.
    ranges = [(-1, len(forward) - 1)]
    while ranges:
        low, high = ranges.pop()
        inside = candidates[bisect_left(candidates, low + 1) : bisect_left(candidates, high)]
        if not inside or ((low != -1 or high != len(forward) - 1) and elapsed[high + 1] - elapsed[low + 1] <= limit):
            continue
        # What passes over the whole range (a skip connection) is there wherever the range is cut, so it does not count.
        passing = sum(life.size for life in lives if life.birth <= low and life.death > high)
        narrowest = min(widths[cut] for cut in inside) - passing
        # All candidates within a quarter of the narrowest: the residual stream of every block, not of one.
        chosen = [cut for cut in inside if widths[cut] - passing <= narrowest * _NEAR_NARROWEST]
        cuts += chosen
        ranges += pairwise([low, *chosen, high])
    return cuts


def _forward_seconds(node: fx.Node) -> float:
    """Of a loss head in tiles, which computes gradients as well, nothing: what is before it would hardly be cut."""
    results = node.target.results if isinstance(node.target, TileLoop) else ()
    has_gradients = any(result.dim is None and math.prod(result.shape) > 1 for result in results)
    return 0.0 if has_gradients else float(node.meta[Mark.SECONDS])


def _candidates(forward: list[fx.Node], widths: list[int], inside_kernel: list[bool]) -> list[int]:
    """The narrowest position between each two consecutive operations that do arithmetic; the last one of equals.

    If nothing does arithmetic, operations that take time are used instead.
    """
    working = [position for position, node in enumerate(forward) if node.meta[Mark.FLOPS]]
    if len(working) < 2:
        working = [position for position, node in enumerate(forward) if node.meta[Mark.SECONDS]]
    tuple_open = inside_tuple(forward)
    positions = []
    # Between two operations that do arithmetic only the narrowest position is a candidate.
    for first, second in pairwise(working):
        closed = [tuple_open[p] or inside_kernel[p] or is_view(forward[p]) for p in range(first, second)]
        allowed = [p for p, shut in zip(range(first, second), closed, strict=True) if not shut]
        if allowed:
            positions.append(min(allowed, key=lambda p: (widths[p], -p)))
    return positions


def inside_tuple(forward: list[fx.Node]) -> list[bool]:
    """Positions at which a tuple has been computed but not yet unpacked; tuples must not cross a cut."""
    position = {node: index for index, node in enumerate(forward)}
    change = [0] * (len(forward) + 1)
    for index, node in enumerate(forward):
        # From a tuple to its last item nothing is cut: a tuple cannot be handed over.
        if isinstance(node.meta.get("val"), (tuple, list)):
            last = max((position.get(user, index) for user in node.users), default=index)
            change[index] += 1
            change[last] -= 1
    open_tuples, result = 0, []
    for index in range(len(forward)):
        open_tuples += change[index]
        result.append(open_tuples > 0)
    return result


def _assign_backward(joint: JointGraph, last_segment: int) -> None:
    """Backward nodes go to the segment of the forward operation they differentiate, as data flow allows.

    The backward visits segments last to first, so a node may belong to no later segment than the backward values it
    reads. Autograd numbers (``seq_nr``) pair a backward node with its forward operation; several forward nodes may
    carry one number, the last of them is the one that was differentiated. Additions that accumulate gradients carry
    the number of the loss, the very end of the forward, so for them the first rule decides. Nodes without a number
    belong to the segment that computes the forward values they read.

    Nodes that wait for no gradient, such as what a function of the user computes once more in its backward, carry that
    number too, but can run at any time. They belong to the segment of their first reader: from any earlier one on they
    would only be held::

        backward of    segment 2        segment 1        segment 0
                       sigmoid(x2)      sigmoid(x1)      sigmoid(x0)      each beside the product that reads it
                       all three                                          by the number of the loss
    """
    by_number: dict[int, int] = {}
    for node in joint.in_phase(Phase.FORWARD):
        if "seq_nr" in node.meta:
            by_number[node.meta["seq_nr"]] = node.meta[Mark.SEGMENT]
    backward = joint.in_phase(Phase.BACKWARD)
    free = _without_gradients(joint, backward)
    waiting = [node for node in backward if node not in free]
    members = set(waiting)
    for node in waiting:
        # The rule of order: no later than anything it reads in the backward.
        limit = min((s.meta[Mark.SEGMENT] for s in input_nodes(node) if s in members), default=last_segment)
        paired = by_number.get(node.meta.get("seq_nr", -1))
        if paired is None and not any(source in members for source in input_nodes(node)):
            reads = [s.meta[Mark.SEGMENT] for s in input_nodes(node) if Mark.SEGMENT in s.meta]
            paired = max(reads, default=None)
        node.meta[Mark.SEGMENT] = limit if paired is None else min(limit, paired)
    # Readers first: some of them are free, too.
    for node in reversed(backward):
        if node in free:
            readers = [user.meta[Mark.SEGMENT] for user in node.users if user.op != "output"]
            node.meta[Mark.SEGMENT] = max(readers, default=last_segment)


def _without_gradients(joint: JointGraph, backward: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes of the backward that wait for no incoming gradient, and whose order does not matter."""
    waiting = {*backward, *joint.tangents}
    for node in backward:
        if waiting.isdisjoint(input_nodes(node)) and not is_seeded(node) and not has_side_effect(node):
            waiting.remove(node)
    return set(backward) - waiting


def _segments(joint: JointGraph, entry_bytes: list[int]) -> list[Segment]:
    count = len(entry_bytes)
    members: list[dict[Phase, list[fx.Node]]] = [{Phase.FORWARD: [], Phase.BACKWARD: []} for _ in range(count)]
    for node in joint.computed():
        members[node.meta[Mark.SEGMENT]][node.meta[Mark.PHASE]].append(node)
    segments = []
    for index, nodes in enumerate(members):
        seconds = {phase: sum(node.meta[Mark.SECONDS] for node in nodes[phase]) for phase in nodes}
        every = [*nodes[Phase.FORWARD], *nodes[Phase.BACKWARD]]
        all_nodes = set(every)
        leaving = [node for node in every if any(user not in all_nodes for user in node.users)]
        segments.append(
            Segment(
                index,
                seconds[Phase.FORWARD],
                seconds[Phase.BACKWARD],
                entry_bytes[index],
                fingerprint(every, leaving),
            )
        )
    return segments
