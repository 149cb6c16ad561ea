"""sum_gradients: a stage module of a pipeline adds parameters' gradients to their sums as soon as it has made them.

The sums over earlier microbatches become inputs of the graph, and what it returns are the new sums. A gradient that is
part of a larger tensor, or that somebody else holds or reads later, is returned as it is: the first microbatch's
gradient becomes the sum, which is written over from then on. A gradient that is a matrix product is added while it is
computed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

import torch
from torch import fx

from roundpipe_fx.cost.model import CostModel
from roundpipe_fx.gradient_sums import add_product_to, add_to
from roundpipe_fx.joint_graph import JointGraph, Mark, Phase, is_tensor, tensor_values
from roundpipe_fx.storage_numbers import OUTSIDE, StorageNumbers

__all__ = ["sum_gradients"]


def sum_gradients(joint: JointGraph, costs: CostModel, in_place: bool = True) -> JointGraph:
    """Add gradients of parameters to their sums.

    Args:
        joint: a graph with stages and phases, in the order in which its modules will run.
        costs: of the additions.
        in_place: whether stages run eagerly; a stage compiler is given additions that make a new sum.
    """
    numbers, holders, position = StorageNumbers(), _Holders(list), {}
    for place, node in enumerate(joint.graph.nodes):
        position[node] = place
        if node.op == "placeholder":
            numbers.give(node, [OUTSIDE] * len(tensor_values(node)))
        elif node.op != "output":
            numbers.follow(node)
        for storage in set(numbers.of(node)) - {OUTSIDE}:
            holders[storage].append(node)
    outputs, primals, labels = joint.outputs, joint.primals, dict(joint.labels)
    returned = Counter(s for node in outputs if isinstance(node, fx.Node) for s in set(numbers.of(node)))
    last = joint.inputs[-1]
    for place, (owner, gradient) in enumerate(zip(joint.gradient_owners, joint.gradients, strict=True)):
        if primals[owner] not in joint.parameters or not isinstance(gradient, fx.Node):
            continue
        storages = numbers.of(gradient)
        if len(storages) != 1 or returned[storages[0]] != 1 or not _stands_alone(gradient, holders[storages[0]]):
            continue
        with joint.graph.inserting_after(last):
            total = last = joint.graph.placeholder(f"sums_{place + 1}")
        value = gradient.meta["val"]
        with value.fake_mode:
            total.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        labels[total] = f"sum_{joint.label(primals[owner])}"
        readers = [user for node in holders[storages[0]] for user in node.users if user.op != "output"]
        with joint.graph.inserting_after(max([gradient, *readers], key=position.__getitem__)):
            made = joint.graph.create_node("call_function", add_to, (total, gradient), name="added")
        made.meta = {key: gradient.meta[key] for key in (*_INHERITED, "val") if key in gradient.meta}
        if gradient.target is torch.ops.aten.mm.default and not readers:
            made.target, made.args = add_product_to, (total, *gradient.args)
            made.meta |= {mark: gradient.meta[mark] for mark in _COSTS if mark in gradient.meta}
        else:
            seconds = costs.seconds(value.numel(), 3 * _bytes(value), value.dtype)
            made.meta |= {Mark.BYTES: 0, Mark.FLOPS: value.numel(), Mark.SECONDS: seconds}
        if not in_place:
            made.meta[Mark.WORKSPACE] = made.meta.get(Mark.WORKSPACE, 0) + _bytes(value)
        outputs[joint.num_forward_outputs + place] = made
    joint.graph.output_node().args = (tuple(outputs),)
    return dataclasses.replace(joint, labels=labels)


_Holders = defaultdict[int, list[fx.Node]]
_COSTS = (Mark.BYTES, Mark.FLOPS, Mark.SECONDS, Mark.WORKSPACE)
_INHERITED = (
    Mark.STAGE,
    Mark.PHASE,
    Mark.SEGMENT,
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
)


def _stands_alone(gradient: fx.Node, holders: list[fx.Node]) -> bool:
    """Whether a gradient is the whole of its memory, and nobody outside the module that makes it sees that."""
    if not is_tensor(gradient) or gradient.op != "call_function" or gradient.meta["val"].layout is not torch.strided:
        return False
    value = gradient.meta["val"]
    whole = value.untyped_storage().nbytes() == _bytes(value)
    module = gradient.meta[Mark.STAGE], gradient.meta[Mark.PHASE]
    readers = [user for node in holders for user in node.users if user.op != "output"]
    return (
        bool(whole)
        and module[1] in (Phase.BACKWARD, Phase.WEIGHT)
        and all((node.meta[Mark.STAGE], node.meta[Mark.PHASE]) == module for node in (*holders, *readers))
    )


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.dtype.itemsize
