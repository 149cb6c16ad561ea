"""Values of a finished graph as the plan reports them: bytes, and seconds of computing and of recomputing them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx

from roundpipe_fx.ir.decisions import PlannedTiles, PlannedValue
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    input_nodes,
    is_tensor,
    is_view,
    module_path,
    tensor_values,
)
from roundpipe_fx.ir.source import find_line
from roundpipe_fx.ir.text import type_text
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.torch_private import module_path_text, size_hint


def planned_values(costs: ValueCosts, nodes: Iterable[fx.Node]) -> tuple[PlannedValue, ...]:
    """Describe some values for the plan, each once however often it is recomputed.

    Args:
        costs: of the values of this graph.
        nodes: values of the graph, and recomputations of them.
    """
    values: dict[str, PlannedValue] = {}
    for node in nodes:
        # Copies that recompute a value are listed under the name of the original, once.
        name = node.meta.get(Mark.ORIGIN, node.name)
        values.setdefault(
            name,
            PlannedValue(
                name=name,
                module=module_path(node, module_path_text),
                type=type_text(node.meta.get("val")),
                bytes=storage_bytes(node),
                reason=hoist_reason(node) or str(node.meta.get(Mark.MUST_RECOMPUTE, "")),
                seconds=costs.seconds(node),
                times=costs.times[name],
                recompute_seconds=costs.recompute_seconds(node),
                line=find_line(node),
            ),
        )
    return tuple(values.values())


def planned_tiles(joint: JointGraph) -> tuple[PlannedTiles, ...]:
    """The loops over tiles of a graph.

    Args:
        joint: a graph with costs.
    """
    loops = [(node, node.target) for node in joint.computed() if isinstance(node.target, TileLoop)]
    return tuple(_describe_loop(node, loop) for node, loop in loops)


def _describe_loop(node: fx.Node, loop: TileLoop) -> PlannedTiles:
    widest = loop.widest
    return PlannedTiles(
        name=widest.name,
        module=module_path(node, module_path_text),
        type=type_text(torch.empty(widest.shape, dtype=widest.dtype, device="meta")),
        bytes=widest.bytes,
        rows=loop.rows,
        tiles=loop.tiles,
        seconds=node.meta[Mark.SECONDS],
        line=find_line(node),
        loop=node.name,
    )


def hoist_reason(node: fx.Node) -> str:
    """Why a value must be saved; ``""`` if it need not be."""
    if Mark.MUST_SAVE in node.meta:
        return str(node.meta[Mark.MUST_SAVE])
    # An item of a tuple that must be saved is saved with the tuple.
    for source in node.all_input_nodes:
        if Mark.MUST_SAVE in source.meta and isinstance(source.meta.get("val"), (tuple, list)):
            return str(source.meta[Mark.MUST_SAVE])
    return ""


def list_allocating(recomputed: Iterable[fx.Node]) -> list[fx.Node]:
    """Of recomputed nodes those that a plan lists: views, which cost nothing, are left out."""
    return [node for node in recomputed if node.meta.get(Mark.BYTES) or Mark.REPLAYED in node.meta]


def storage_bytes(node: fx.Node) -> int:
    """Bytes of the storages that the node's value keeps alive."""
    sizes = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in tensor_values(node)}
    return sum(size_hint(size) for size in sizes.values())


class ValueCosts:
    """Costs of the values of a finished graph."""

    def __init__(self, joint: JointGraph, saved: Iterable[fx.Node]) -> None:
        self._saved = {node.name for node in saved}
        self._producers: dict[fx.Node, tuple[float, list[fx.Node]]] = {}
        self.times = Counter(node.meta[Mark.ORIGIN] for node in joint.computed() if Mark.ORIGIN in node.meta)
        """How often each value is recomputed, by name."""

    def is_passing(self, node: fx.Node) -> bool:
        """Return whether only the forward needs a value."""
        forward = node.meta[Mark.PHASE] is Phase.FORWARD and is_tensor(node) and not is_view(node)
        return forward and node.name not in self._saved and not self.times[node.name]

    def seconds(self, node: fx.Node) -> float:
        """Modelled seconds of the operation that produces a value."""
        producer = node
        # Seconds are noted where the kernel runs: the item of a tuple has those of the call that makes the tuple.
        while not producer.meta.get(Mark.SECONDS) and isinstance(producer.meta.get("val"), torch.Tensor):
            sources = [s for s in input_nodes(producer) if isinstance(s.meta.get("val"), (tuple, list))]
            if producer.target is not operator.getitem or not sources:
                break
            producer = sources[0]
        return float(producer.meta.get(Mark.SECONDS, 0.0))

    def recompute_seconds(self, node: fx.Node) -> float:
        """Modelled seconds of recomputing a value from saved values and graph inputs."""
        # All operations between the saved values and this one, each counted once though several paths lead to it.
        total, pending, seen = 0.0, [node], {node}
        while pending:
            current = pending.pop()
            if current not in self._producers:
                self._producers[current] = self._producer(current)
            seconds, sources = self._producers[current]
            total += seconds
            for source in sources:
                if source not in seen:
                    seen.add(source)
                    pending.append(source)
        return total

    def _producer(self, node: fx.Node) -> tuple[float, list[fx.Node]]:
        """Seconds of an operation, and those of its operands that must be recomputed for it."""
        sources = input_nodes(node)
        missing = [source for source in sources if source.op != "placeholder" and source.name not in self._saved]
        return float(node.meta.get(Mark.SECONDS, 0.0)), missing
