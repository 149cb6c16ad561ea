"""unread_outputs: return the narrow values from which outputs are computed, instead of outputs that nobody reads.

A language model returns its scores beside the loss. Where the caller takes the loss alone, nothing but the loss reads
them, so they may be computed one tile at a time, once they are no output::

    scores = mm(hidden, words)             scores = mm(hidden, words)
    loss = cross_entropy(scores)           loss = cross_entropy(scores)
    return loss, scores                    return loss, hidden

What computes the output from the value in its stead is kept (:class:`roundpipe_fx.ir.unread_output.UnreadOutput`), for
a caller that reads it after all (:mod:`roundpipe_fx.runtime.unread_outputs`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from torch import fx

from roundpipe_fx.analysis.cost.model import dense_bytes
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    has_side_effect,
    is_seeded,
    is_tensor,
    storages,
    tensor_values,
    viewed,
)
from roundpipe_fx.ir.unread_output import UnreadOutput
from roundpipe_fx.torch_private import graph_module

_NARROW = 4
"""A value stands for an output if it has at most one in so many of its bytes."""


def drop_unread_outputs(joint: JointGraph, outputs: Collection[int]) -> JointGraph:
    """Return narrow values instead of outputs that are computed from them and from parameters.

    Args:
        joint: a graph before it is cut; it is rewritten.
        outputs: numbers of outputs that nobody reads. Those that no narrow value determines stay.
    """
    constant = _computed_from_parameters(joint)
    results, unread = joint.outputs, dict(joint.unread)
    for position in sorted(set(outputs) - joint.unread.keys()):
        sources = _sources(joint, position, constant)
        if sources is None:
            continue
        operations, narrow, inputs = sources
        unread[position] = _unread_output(joint, results[position], operations, narrow, inputs)
        results[position] = narrow
    if len(unread) == len(joint.unread):
        return joint
    joint.graph.output_node().args = (results,)
    joint.drop_unread()
    return dataclasses.replace(joint, unread=unread)


def _computed_from_parameters(joint: JointGraph) -> set[fx.Node]:
    """Values that are computed from parameters and constants alone."""
    constant: set[fx.Node] = set(joint.parameters)
    for node in joint.computed():
        if all(source in constant for source in node.all_input_nodes):
            constant.add(node)
    return constant


def _sources(
    joint: JointGraph, position: int, constant: Collection[fx.Node]
) -> tuple[list[fx.Node], fx.Node, list[fx.Node]] | None:
    """The operations that compute an output, the narrow value and the graph inputs that they read.

    Returns:
        ``None``: the output is not determined by one narrow value, or something else that is returned shares its
        memory.
    """
    output = joint.outputs[position]
    others = [node for number, node in enumerate(joint.forward_outputs) if number != position]
    memory = set(storages(output))
    if any(isinstance(node, fx.Node) and memory & set(storages(node)) for node in others):
        return None
    most = dense_bytes(output.meta["val"]) // _NARROW
    needed, narrow, inputs = {output}, set[fx.Node](), set[fx.Node]()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if _must_run_once(node):
            return None
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                inputs.add(source)
            elif is_tensor(source) and source not in constant and _storage_bytes(source) <= most:
                narrow.add(source)
            elif source not in needed:
                needed.add(source)
                waiting.append(source)
    primals = [node for node in joint.primals if node in inputs and node not in joint.mutated_inputs]
    if len(narrow) != 1 or len(primals) != len(inputs):
        return None
    return [node for node in joint.computed() if node in needed], narrow.pop(), primals


def _storage_bytes(node: fx.Node) -> int:
    return max(dense_bytes(value) for value in (*tensor_values(viewed(node)), node.meta["val"]))


def _must_run_once(node: fx.Node) -> bool:
    """Test for an operation that gives other results, or has an effect, if it runs again."""
    once = is_seeded(node) or has_side_effect(node) or Mark.MUST_SAVE in node.meta
    return node.op != "call_function" or once


def _unread_output(
    joint: JointGraph, output: fx.Node, operations: list[fx.Node], narrow: fx.Node, inputs: list[fx.Node]
) -> UnreadOutput:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (narrow, *inputs):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = node.meta["val"]
    for node in operations:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[output])
    value = output.meta["val"]
    assert isinstance(value, torch.Tensor)
    numbers = {node: number for number, node in enumerate(joint.primals)}
    return UnreadOutput(
        value=value, module=graph_module(joint.module, graph), inputs=tuple(numbers[node] for node in inputs)
    )
