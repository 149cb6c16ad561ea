"""tied_gradients: the gradient of a parameter that several stages use is added up at the step's end.

Autograd adds the parts of such a gradient as they arrive, so in a pipeline each microbatch would send a part as large
as the parameter from stage to stage (a language model's tied embedding: from the last to the first). Here each stage
returns what its own uses of the parameter add up to; they are summed over the microbatches where they are made, and
together when all are there.

More than two parts are so added in another order than autograd's, as those of several microbatches are anyway. A sum
that was cast or otherwise used before it became a gradient stays as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch
from torch import fx

from roundpipe_fx.joint_graph import JointGraph, Mark, is_tensor

__all__ = ["split_tied_gradients"]


def split_tied_gradients(joint: JointGraph) -> JointGraph:
    """Return what each stage adds to such gradients, instead of their sum.

    Args:
        joint: a graph with stages.
    """
    position = {node: place for place, node in enumerate(joint.graph.nodes)}
    outputs = joint.outputs
    further: list[fx.Node] = []
    owners: list[int] = []
    for owner, gradient in enumerate(joint.gradients):
        if not isinstance(gradient, fx.Node) or outputs.count(gradient) > 1:
            continue
        addends = sorted(_addends(gradient), key=lambda node: (-_stage(node), position[node]))
        parts = [_sum(joint, list(own), gradient) for _, own in itertools.groupby(addends, _stage)]
        outputs[joint.num_forward_outputs + owner] = parts[0]
        further += parts[1:]
        owners += [owner] * (len(parts) - 1)
    if not further:
        return joint
    joint.graph.output_node().args = ((*outputs, *further),)
    joint.drop_unread()
    return dataclasses.replace(joint, parts=tuple(owners))


def _stage(node: fx.Node) -> int:
    return int(node.meta[Mark.STAGE])


def _addends(value: fx.Node) -> list[fx.Node]:
    """What a value adds up from; itself if it is no sum, or one of a single stage."""
    if value.target is not torch.ops.aten.add.Tensor or len(value.args) != 2 or value.kwargs or len(value.users) != 1:
        return [value]
    found: list[fx.Node] = []
    for operand in value.args:
        if not isinstance(operand, fx.Node) or operand.op != "call_function" or not _alike(operand, value):
            return [value]
        found += _addends(operand)
    return [value] if {_stage(node) for node in found} == {_stage(value)} else found


def _alike(left: fx.Node, right: fx.Node) -> bool:
    if not (is_tensor(left) and is_tensor(right)):
        return False
    one, other = left.meta["val"], right.meta["val"]
    return bool(one.dtype == other.dtype and str(tuple(one.shape)) == str(tuple(other.shape)))


def _sum(joint: JointGraph, addends: list[fx.Node], like: fx.Node) -> fx.Node:
    """What one stage adds, from those that run first on."""

    def add(left: fx.Node, right: fx.Node) -> fx.Node:
        with joint.graph.inserting_after(right):
            made = joint.graph.call_function(torch.ops.aten.add.Tensor, (left, right))
        made.meta = {**like.meta, Mark.STAGE: _stage(right), Mark.SEGMENT: right.meta[Mark.SEGMENT]}
        return made

    return functools.reduce(add, addends)
