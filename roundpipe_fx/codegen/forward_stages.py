"""Forward stages: the forward of each stage as a graph of its own, which autograd differentiates when it runs.

This is what other pipeline runtimes take, which hand values from one stage to the next one only::

    joint graph ── forward nodes by stage ──▶ stage 0 ──sends──▶ stage 1 ──sends──▶ stage 2 ──▶ results
                                                 ▲                  ▲                  ▲
                                                 └── parameters, buffers, the batch ───┘

What is computed from the batch and buffers alone (masks, rotary embeddings) needs no gradient: where a later stage
than the next one reads it, or where it is no floating-point tensor, each reader computes it again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, has_side_effect, input_nodes, is_seeded, module_path
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.torch_private import graph_module, module_path_text


@dataclass(frozen=True, kw_only=True)
class ForwardStage:
    """The forward of one stage.

    Attributes:
        module: takes the values of ``received``, then those of ``primals``; returns a tuple of those of ``sent``, then
            the new values of ``updated``.
        received: values of the stage before.
        primals: graph inputs that it reads.
        sent: what it hands to the next stage; of the last one, the model's results.
        updated: graph inputs that are overwritten with what it computes.
    """

    module: fx.GraphModule
    received: tuple[fx.Node, ...]
    primals: tuple[fx.Node, ...]
    sent: tuple[fx.Node, ...]
    updated: tuple[fx.Node, ...]


def forward_stages(joint: JointGraph) -> list[ForwardStage]:
    """The forward of each stage.

    Args:
        joint: a graph with stages, in which nothing is recomputed yet.

    Raises:
        ValueError: a value skips a stage, a trained tensor is read by several stages, or the forward alone does not
            determine the gradients; the message names what it is.
    """
    _refuse_own_gradients(joint)
    primals = joint.primals
    updates = {primals[position]: joint.forward_outputs[output] for output, position in joint.updates.items()}
    changed = set(joint.updates)
    results = [node for position, node in enumerate(joint.forward_outputs) if position not in changed]
    returned = tuple(node for node in results if isinstance(node, fx.Node))
    stages = _map_to_stages(joint)
    last = max(stages.values())
    # Only what results and new values depend on: other operations have no place in a stage.
    needed = _find_ancestors((*returned, *(node for node in updates.values() if isinstance(node, fx.Node))))
    batch_nodes = _find_batch_nodes(joint, needed, updates.keys())
    readers: dict[fx.Node, set[int]] = {}
    for node in needed:
        for source in input_nodes(node):
            readers.setdefault(source, set()).add(stages.get(node, 0))
    for node in returned:
        readers.setdefault(node, set()).add(last)
    # Values of the batch alone need no gradient, so a later stage computes them again instead of receiving them.
    recomputed = {
        node
        for node in batch_nodes
        if not _is_float(node) or any(stage > stages[node] + 1 for stage in readers.get(node, ()))
    }
    nodes: list[set[fx.Node]] = [set() for _ in range(last + 1)]
    received: list[set[fx.Node]] = [set() for _ in range(last + 1)]
    for node in (node for node in needed if node in stages):
        nodes[stages[node]].add(node)
    # What a stage reads of others: repeated here if it is of the batch, else received.
    for stage in range(last + 1):
        sources = [source for node in nodes[stage] for source in input_nodes(node)]
        sources += returned if stage == last else ()
        for node in (node for node in sources if node in stages and stages[node] != stage):
            if node in recomputed:
                nodes[stage] |= {reader for reader in _find_ancestors([node]) if reader in stages}
            else:
                received[stage].add(node)
    # Something that one reader has repeated need not be received for another.
    for stage in range(last + 1):
        received[stage] -= nodes[stage]
    _refuse_skips(joint, stages, received)
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    stages_in_order = []
    for stage in range(last + 1):
        # A stage sends what the next one receives; the last one sends the model's results.
        sent = sorted(received[stage + 1], key=order.__getitem__) if stage < last else list(returned)
        new = {
            number: node
            for number, node in updates.items()
            if isinstance(node, fx.Node) and stages.get(node, 0) == stage
        }
        stages_in_order.append(
            _build_stage(joint, stage, sorted(nodes[stage], key=order.__getitem__), received[stage], sent, new)
        )
    _refuse_shared(joint, stages_in_order)
    return stages_in_order


def _map_to_stages(joint: JointGraph) -> dict[fx.Node, int]:
    """The stage of each node of the forward; parts of a result are in the stage that computes it."""
    stages: dict[fx.Node, int] = {}
    for node in joint.in_phase(Phase.FORWARD):
        source = node.args[0] if node.target is operator.getitem else None
        stages[node] = stages[source] if isinstance(source, fx.Node) and source in stages else node.meta[Mark.STAGE]
    return stages


def _find_ancestors(results: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Find results and everything that they are computed from."""
    needed_nodes: dict[fx.Node, None] = {}
    pending = list(results)
    while pending:
        node = pending.pop()
        if node not in needed_nodes:
            needed_nodes[node] = None
            pending.extend(input_nodes(node))
    return needed_nodes


def _find_batch_nodes(joint: JointGraph, needed: Iterable[fx.Node], updated: Iterable[fx.Node]) -> set[fx.Node]:
    """Find the nodes that are computed from the batch, and from buffers that stay as they are."""
    changing = set(updated)
    fixed = {node for node in joint.primals if node not in changing and not _is_trained(joint, node)}
    candidates, batch_nodes = set(needed), set(fixed)
    for node in joint.in_phase(Phase.FORWARD):
        if (
            node in candidates
            and not is_seeded(node)
            and not has_side_effect(node)
            and batch_nodes.issuperset(input_nodes(node))
        ):
            batch_nodes.add(node)
    return batch_nodes - fixed


def _is_trained(joint: JointGraph, node: fx.Node) -> bool:
    """Return whether a gradient is computed for a graph input."""
    if not joint.gradients:
        return False
    return joint.gradients[joint.primals.index(node)] is not None


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _build_stage(
    joint: JointGraph,
    stage: int,
    nodes: Sequence[fx.Node],
    received: Iterable[fx.Node],
    sent: Sequence[fx.Node],
    updates: dict[fx.Node, fx.Node],
) -> ForwardStage:
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    outputs = [*sent, *updates.values()]
    inputs = {source for node in nodes for source in input_nodes(node)} | set(outputs)
    primals = [node for node in joint.primals if node in inputs]
    arriving = sorted(received, key=order.__getitem__)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in (*arriving, *primals):
        copies[source] = graph.placeholder(source.name)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return ForwardStage(
        module=graph_module(joint.module, graph, f"stage_{stage}"),
        received=tuple(arriving),
        primals=tuple(primals),
        sent=tuple(sent),
        updated=tuple(updates),
    )


def _refuse_own_gradients(joint: JointGraph) -> None:
    if joint.own_gradients:
        raise ValueError(
            "PyTorch's pipeline differentiates the forward of each stage by autograd, and the model decides itself "
            f"about the gradient of {'; '.join(joint.own_gradients[:3])} (no_grad, detach, or a backward of its own). "
            "Write this part without it, or train with model.forward_backward."
        )
    if any(isinstance(node.target, TileLoop) for node in joint.graph.nodes):
        raise ValueError(
            "operations of this plan run in tiles, which autograd does not differentiate: compile with tiling='never', "
            "or without a memory_budget."
        )


def _describe_node(joint: JointGraph, node: fx.Node) -> str:
    path = module_path(node, module_path_text)
    return f"{joint.label(node)!r}" + (f" of {path}" if path else "")


def _refuse_skips(joint: JointGraph, stages: dict[fx.Node, int], received: Sequence[set[fx.Node]]) -> None:
    skips = []
    for stage, values in enumerate(received):
        for node in values:
            if stages[node] != stage - 1:
                skips.append(f"{_describe_node(joint, node)} goes from stage {stages[node]} to stage {stage}")
            elif not _is_float(node):
                skips.append(f"{_describe_node(joint, node)}, which stage {stage} reads, is no floating-point tensor")
    if skips:
        raise ValueError(
            "PyTorch's pipeline hands floating-point tensors from each stage to the next one only: "
            f"{'; '.join(sorted(skips)[:5])} ({len(skips)} in all). Use fewer stages, or begin them elsewhere: "
            "stages=[…]; model.forward_backward has no such limit."
        )


def _refuse_shared(joint: JointGraph, stages: Sequence[ForwardStage]) -> None:
    for node in joint.primals:
        readers = [stage for stage, forward_stage in enumerate(stages) if node in forward_stage.primals]
        updated = any(node in forward_stage.updated for forward_stage in stages)
        if len(readers) > 1 and (updated or (node in joint.parameters and _is_trained(joint, node))):
            raise ValueError(
                f"{joint.label(node)!r} is read by stages {readers}, and PyTorch's pipeline does not sum the gradients "
                "of tied weights, nor share buffers that stages update. Untie it, or begin stages so that one has all "
                "that read it: stages=[…]; model.forward_backward has no such limit."
            )
