"""tiles: regions of operations become loops over tiles of rows.

A region's forward becomes one loop, and its backward another, which recomputes for each tile what it reads of the
forward; so nothing wide is saved, or exists. Where the whole backward of a region is proportional to one scalar (a loss
head), both are one loop in the forward, which makes the gradients as if the scalar were one; the backward multiplies.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import annotate_node
from roundpipe_fx.analysis.tiling.body import (
    BodyCosts,
    Divided,
    Loops,
    UnfitError,
    divide,
    flat_shape,
    is_flat,
    sources_of,
)
from roundpipe_fx.analysis.tiling.tiled_region import TileRegion
from roundpipe_fx.ir.graph_edit import inherit_origin, insert_call, substitute_node
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, input_nodes, is_tensor, is_view, module_path
from roundpipe_fx.torch_private import module_path_text

aten = torch.ops.aten


def tile_regions(joint: JointGraph, tiled: Iterable[tuple[TileRegion, int]], costs: BodyCosts) -> JointGraph:
    """Replace regions by loops.

    Args:
        joint: an annotated graph; it is rewritten.
        tiled: regions, with nodes of this graph or of one that it is a copy of, and their number of tiles.
        costs: how bodies are made and counted.
    """
    # Equal regions share a loop, so the regions are tiled with one set of them.
    loops = Loops(costs)
    stands_for: dict[fx.Node, fx.Node] = {}
    for region, tiles in [(region.copy_to(joint.graph), tiles) for region, tiles in tiled]:
        # A region may read what an earlier region's loop returns in place of its members.
        completed = _with_results_of_others(region, stands_for)
        tile = _tile_apart if completed.scalar is None else _tile_at_once
        for result, value in tile(joint, completed, tiles, loops).items():
            substitute_node(result, value)
            stands_for[value] = result
        _sort(joint)
    joint.drop_unread()
    return joint


def _with_results_of_others(region: TileRegion, stands_for: Mapping[fx.Node, fx.Node]) -> TileRegion:
    """A region that reads what other regions' loops made in place of what it was found with.

    Args:
        region: found before there were loops.
        stands_for: what values of loops have replaced.
    """
    where = {value: region.where[old] for value, old in stands_for.items() if old in region.where}
    scalar = next((value for value, old in stands_for.items() if old is region.scalar), region.scalar)
    return dataclasses.replace(region, where={**region.where, **where}, scalar=scalar)


def _tile_apart(joint: JointGraph, region: TileRegion, tiles: int, loops: Loops) -> dict[fx.Node, fx.Node]:
    """A loop for the forward, and one for the backward; returns what stands for each result."""
    forward, backward = region.in_phase(Phase.FORWARD), region.in_phase(Phase.BACKWARD)
    returned = {output for output in joint.outputs if isinstance(output, fx.Node)}

    def is_available(node: fx.Node) -> bool:
        """Return whether the backward is given a forward value rather than recomputing it."""
        return node in returned or (node not in region.where and node not in region.whole and is_tensor(node))

    # The backward's loop recomputes the forward's wide values tile by tile, starting from what exists as a whole.
    recomputed = _makers(
        {source for node in backward for source in input_nodes(node)} & set(forward), forward, is_available
    )
    read = {source for node in (*recomputed, *backward) for source in input_nodes(node) if is_available(source)}
    inside = set(region.members)
    loop_results: dict[fx.Node, fx.Node] = {}
    # Two loops: results of the forward's are saved where the backward reads them, and are narrow or sums.
    for nodes, phase in ((forward, Phase.FORWARD), ([*recomputed, *backward], Phase.BACKWARD)):
        remaining = set(nodes) - set(recomputed if phase is Phase.BACKWARD else ())
        results = [
            node
            for node in nodes
            if node in remaining
            and node not in region.whole
            and isinstance(node.meta.get("val"), torch.Tensor)
            and (node in returned or node in read or any(user not in inside for user in node.users))
        ]
        if not results:
            continue
        firsts = _find_firsts(results, returned)
        made = list(dict.fromkeys(firsts.values()))
        divided = divide(region, nodes, made, _copied_flat(region, nodes, loops.costs))
        try:
            values = dict(zip(made, _insert_loop(joint, divided, tiles, phase, loops), strict=True))
        except UnfitError:
            # Strides that do not fit: the region stays as it is.
            return {}
        loop_results.update({result: values[first] for result, first in firsts.items()})
    return loop_results


def _find_firsts(results: Iterable[fx.Node], returned: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Find to each result the first that is the same view of the same value: a loop would write both as a whole.

    What the graph returns stands for itself: its outputs and gradients are separate tensors.
    """
    firsts: dict[Any, fx.Node] = {}
    return {
        result: firsts.setdefault((result.target, repr(result.args), repr(result.kwargs)), result)
        if is_view(result) and result not in returned
        else result
        for result in results
    }


def _tile_at_once(joint: JointGraph, region: TileRegion, tiles: int, loops: Loops) -> dict[fx.Node, fx.Node]:
    """One loop in the forward for forward and backward, as if the incoming gradient were one."""
    scalar = region.scalar
    assert scalar is not None
    example, last = scalar.meta["val"], region.in_phase(Phase.FORWARD)[-1]
    # The backward runs in the forward's loop as if the loss's gradient were 1; it is linear in that gradient.
    unit_gradient = insert_call(
        last, aten.full.default, list(example.shape), 1.0, dtype=example.dtype, device=example.device
    )
    _mark(unit_gradient, Phase.FORWARD, loops.costs)
    inside = set(region.members)
    results = [
        node
        for node in region.members
        if node not in region.whole
        and isinstance(node.meta.get("val"), torch.Tensor)
        and any(user not in inside for user in node.users)
    ]
    instead = {scalar: unit_gradient, **_copied_flat(region, region.members, loops.costs)}
    divided = divide(region, region.members, results, instead)
    _bring_forward(divided.operands)
    try:
        values = _insert_loop(joint, divided, tiles, Phase.FORWARD, loops)
    except UnfitError:
        return {}
    number = scalar
    if example.dim():  # as it is, it would be broadcast
        first = next(node for node in results if node.meta[Mark.PHASE] is Phase.BACKWARD)
        number = insert_call(first, aten.view.default, scalar, [])
        _mark(number, Phase.BACKWARD, loops.costs)
    loop_results: dict[fx.Node, fx.Node] = {}
    for result, value in zip(results, values, strict=True):
        loop_results[result] = value
        # Gradients are scaled when the real one has arrived.
        if result.meta[Mark.PHASE] is not Phase.FORWARD:
            loop_results[result] = insert_call(result, aten.mul.Tensor, value, number)
            _mark(loop_results[result], Phase.BACKWARD, loops.costs)
    return loop_results


def _bring_forward(nodes: Iterable[fx.Node]) -> None:
    """Let what the backward makes without incoming gradients be the forward's."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.meta.get(Mark.PHASE) is Phase.BACKWARD:
            node.meta[Mark.PHASE] = Phase.FORWARD
            waiting += input_nodes(node)


def _makers(
    targets: Collection[fx.Node], nodes: Sequence[fx.Node], is_available: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """The nodes that make some values from what is available, in order."""
    needed = {node for node in targets if not is_available(node)}
    for node in reversed(nodes):
        if node in needed:
            needed.update(source for source in input_nodes(node) if not is_available(source))
    return [node for node in nodes if node in needed]


def _copied_flat(region: TileRegion, nodes: Sequence[fx.Node], costs: BodyCosts) -> dict[fx.Node, fx.Node]:
    """Copies of operands whose rows are not evenly apart in memory, by operand."""
    inside, copies = set(nodes), {}
    for operand in sources_of(nodes):
        if operand in inside or operand not in region.where or is_flat(operand.meta["val"], region.where[operand]):
            continue
        copied = insert_call(nodes[-1], aten.clone.default, operand, memory_format=torch.contiguous_format)
        _mark(copied, nodes[-1].meta[Mark.PHASE], costs)
        copies[operand] = copied
    return copies


def _insert_loop(joint: JointGraph, divided: Divided, tiles: int, phase: Phase, loops: Loops) -> list[fx.Node]:
    """Insert a loop; returns what stands for its results."""
    costs = loops.costs
    region, last = divided.region, [node for node in divided.nodes if node.meta[Mark.PHASE] is phase][-1]
    path = module_path(region.widest, module_path_text).rpartition(".")[2]
    name = re.sub(r"\W", "_", path) or "model"
    loop, cost = loops.make_loop(divided, tiles, f"tiles_of_{name}")
    operands = []
    for operand in divided.operands:
        # Rows in several dimensions are one dimension for the loop.
        if operand in region.where and len(region.where[operand]) > 1:
            shape = flat_shape(operand.meta["val"].shape, region.where[operand])
            operand = insert_call(last, aten.view.default, operand, shape)
            _mark(operand, phase, costs)
        operands.append(operand)
    with joint.graph.inserting_before(last):
        loop_node = joint.graph.create_node("call_function", loop, tuple(operands), name="in_tiles")
    inherit_origin(loop_node, region.widest)
    with divided.results[0].meta["val"].fake_mode:
        device = divided.results[0].meta["val"].device
        loop_node.meta["val"] = tuple(
            torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device=device)
            for result in loop.results
        )
    loop_node.meta[Mark.PHASE] = phase
    annotate_node(loop_node, costs.model)
    loop_node.meta[Mark.SECONDS], loop_node.meta[Mark.FLOPS] = cost.seconds, cost.flops
    loop_node.meta[Mark.WORKSPACE] = cost.workspace
    reasons = [node.meta[Mark.MUST_RECOMPUTE] for node in divided.results if Mark.MUST_RECOMPUTE in node.meta]
    values = []
    for position, result in enumerate(divided.results):
        with joint.graph.inserting_before(last):
            item = joint.graph.call_function(operator.getitem, (loop_node, position))
        inherit_origin(item, region.widest)
        item.meta["val"] = loop_node.meta["val"][position]
        _mark(item, phase, costs)
        # Inside a user's checkpoint the loop's results must not be saved either.
        if reasons and phase is Phase.FORWARD:
            item.meta[Mark.MUST_RECOMPUTE] = reasons[0]
        if result in region.where and len(region.where[result]) > 1:
            item = insert_call(last, aten.view.default, item, list(result.meta["val"].shape))
            _mark(item, phase, costs)
        values.append(item)
    return values


def _mark(node: fx.Node, phase: Phase, costs: BodyCosts) -> None:
    node.meta[Mark.PHASE] = phase
    annotate_node(node, costs.model)


def _sort(joint: JointGraph) -> None:
    """Put nodes in an order in which each comes after what it reads, and else where it was."""
    placed: set[fx.Node] = set()
    begun: set[fx.Node] = set()
    order: list[fx.Node] = []
    for root in list(joint.graph.nodes):
        waiting = [root]
        # Depth first with a stack: a node is placed when all its sources are; `begun` finds circles.
        while waiting:
            node = waiting[-1]
            missing = [source for source in node.all_input_nodes if source not in placed]
            if missing:
                assert node not in begun, f"{node.name} depends on itself"
                begun.add(node)
                waiting += missing
                continue
            waiting.pop()
            if node not in placed:
                placed.add(node)
                order.append(node)
    # Only nodes that are not where they belong are moved.
    for before, node in itertools.pairwise(order):
        if before.next is not node:
            before.append(node)
