"""tied_gradients: contributions of several uses of a parameter to its gradient are returned separately.

Autograd adds the parts of such a gradient as they arrive, so in a pipeline each microbatch would send a part as large
as the parameter from stage to stage (a language model's tied embedding: from the last to the first), and hold it until
the last part arrives. Separately, each is added to its stage's sum over the microbatches as soon as it is computed, and
the sums of several devices are added at the end of the step.

More than two parts are thus added in another order than autograd's, as those of several microbatches are anyway. A sum
that was cast or otherwise used before it became a gradient stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph, is_tensor


def split_tied_gradients(joint: JointGraph) -> JointGraph:
    """Return the parts of parameters' gradients instead of their sums."""
    outputs, primals = joint.outputs, joint.primals
    times = Counter(output for output in outputs if isinstance(output, fx.Node))
    further: list[fx.Node] = []
    owners: list[int] = []
    for position, (owner, gradient) in enumerate(zip(joint.gradient_owners, joint.gradients, strict=True)):
        if owner is None or primals[owner] not in joint.parameters or times[gradient] > 1:
            continue
        first, *others = _addends(gradient)
        outputs[joint.num_forward_outputs + position] = first
        further += others
        owners += [owner] * len(others)
    if not further:
        return joint
    joint.graph.output_node().args = ((*outputs, *further),)
    joint.drop_unread()
    return dataclasses.replace(joint, parts=tuple(owners))


def _addends(value: fx.Node) -> list[fx.Node]:
    """The terms of a sum; the value itself if it is not a sum."""
    if value.target is not torch.ops.aten.add.Tensor or len(value.args) != 2 or value.kwargs or len(value.users) != 1:
        return [value]
    operands = [operand for operand in value.args if isinstance(operand, fx.Node) and _like(operand, value)]
    if len(operands) != 2 or operands[0] is operands[1]:
        return [value]
    return [addend for operand in operands for addend in _addends(operand)]


def _like(operand: fx.Node, result: fx.Node) -> bool:
    """Return whether an operand is a tensor of the result's shape and type that was computed."""
    if operand.op != "call_function" or not (is_tensor(operand) and is_tensor(result)):
        return False
    first, second = operand.meta["val"], result.meta["val"]
    return bool(first.dtype == second.dtype and str(tuple(first.shape)) == str(tuple(second.shape)))
