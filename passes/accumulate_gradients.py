"""accumulate_gradients: a pipeline's stage module adds parameters' gradients to their sums once they are computed.

The sums over earlier microbatches become inputs of the graph, which returns the new sums. The first microbatch's
gradient becomes the sum, which is updated in place from then on; if it is part of a larger tensor or is referred to
elsewhere, a copy does. A gradient that is a matrix product is added while it is computed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost.model import CostModel
from roundpipe_fx.analysis.storage_ids import OUTSIDE, StorageIds
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, is_tensor, tensor_values
from roundpipe_fx.operators.gradient_sums import add_copy_to, add_product_to, add_to


def accumulate_gradients(joint: JointGraph, costs: CostModel, in_place: bool = True) -> JointGraph:
    """Add gradients of parameters to their sums; parts that one module computes are added to one sum.

    Args:
        joint: a graph with stages and phases, in the order in which its modules will run.
        in_place: whether stages run eagerly; a stage compiler gets out-of-place additions.
    """
    numbers, holders, position = StorageIds(), _Holders(list), {}
    for index, node in enumerate(joint.graph.nodes):
        position[node] = index
        if node.op == "placeholder" or node.meta.get(Mark.PHASE) is Phase.FORWARD:
            numbers.assign(node, [OUTSIDE] * len(tensor_values(node)))
        elif node.op != "output":
            numbers.follow(node)
        for storage in set(numbers.get(node)) - {OUTSIDE}:
            holders[storage].append(node)
    # A storage that is returned twice must not be written to: both results are the caller's.
    returned = Counter(s for node in joint.outputs if isinstance(node, fx.Node) for s in set(numbers.get(node)))
    primals = joint.primals
    results: dict[int, list[Any]] = defaultdict(list)
    additions: list[_Addition] = []
    owners, gradients = joint.gradient_owners, joint.gradients
    # Three cases: no sum (inputs, gradients made elsewhere), a copy into the sum, or adding in place.
    for owner, gradient in zip(owners, gradients, strict=True):
        if owner is None:
            continue
        storages = numbers.get(gradient) if isinstance(gradient, fx.Node) else []
        if primals[owner] not in joint.parameters or not _is_made_in_backward(gradient):
            results[owner].append(gradient)
        elif returned[storages[0]] != 1 or not _stands_alone(gradient, holders[storages[0]]):
            additions.append(_Addition(owner, gradient, gradient, add_copy_to))
        else:
            # Added behind the last reader of the gradient, so nobody reads the sum in its place. A product without
            # other readers is added by the kernel that computes it.
            readers = [user for node in holders[storages[0]] for user in node.users if user.op != "output"]
            product = gradient.target is torch.ops.aten.mm.default and not readers
            last_reader = max([gradient, *readers], key=position.__getitem__)
            additions.append(_Addition(owner, gradient, last_reader, add_product_to if product else add_to))
    labels = dict(joint.labels)
    sums: dict[tuple[Any, ...], fx.Node] = {}
    tails: dict[fx.Node, fx.Node] = {}
    last = joint.inputs[-1]
    # In the order in which gradients are complete; parts that one module computes go to one sum, one after another.
    for addition in sorted(additions, key=lambda addition: position[addition.after]):
        key = (addition.owner, *_module(addition.gradient))
        if key not in sums:
            with joint.graph.inserting_after(last):
                sums[key] = last = joint.graph.placeholder(f"sums_{len(sums) + 1}")
            last.meta["val"] = _copy(addition.gradient.meta["val"])
            labels[last] = f"sum_{joint.label(primals[addition.owner])}"
        with joint.graph.inserting_after(tails.get(addition.after, addition.after)):
            sums[key] = tails[addition.after] = _added(joint, sums[key], addition, costs, in_place)
    for (owner, *_), total in sums.items():
        results[owner].append(total)
    captured = list(zip(owners, gradients, strict=True))[: len(gradients) - len(joint.parts)]
    # The first sum of each owner takes the gradient's place among the results; further parts are appended.
    firsts = [gradient if owner is None else results[owner].pop(0) for owner, gradient in captured]
    parts = [(owner, part) for owner, of_owner in sorted(results.items()) for part in of_owner]
    forward = joint.forward_outputs
    joint.graph.output_node().args = ((*forward, *firsts, *(part for _, part in parts)),)
    return dataclasses.replace(joint, labels=labels, parts=tuple(owner for owner, _ in parts))


@dataclasses.dataclass(frozen=True)
class _Addition:
    """A gradient that is to be added.

    Attributes:
        owner: number of the input that it is the gradient of, or a part of it.
        gradient: the node that computes it.
        after: the node after which it is added.
        target: the function that adds it.
    """

    owner: int
    gradient: fx.Node
    after: fx.Node
    target: Callable[..., torch.Tensor]


def _added(joint: JointGraph, total: fx.Node, addition: _Addition, costs: CostModel, in_place: bool) -> fx.Node:
    gradient, value = addition.gradient, total.meta["val"]
    operands = gradient.args if addition.target is add_product_to else (gradient,)
    sum_node = joint.graph.create_node("call_function", addition.target, (total, *operands), name="added")
    sum_node.meta = {key: gradient.meta[key] for key in _INHERITED if key in gradient.meta} | {"val": value}
    if addition.target is add_product_to:
        sum_node.meta |= {mark: gradient.meta[mark] for mark in _COSTS if mark in gradient.meta}
    else:
        seconds = costs.seconds(value.numel(), 3 * _bytes(value), value.dtype)
        sum_node.meta |= {Mark.BYTES: 0, Mark.FLOPS: value.numel(), Mark.SECONDS: seconds}
    if not in_place:
        sum_node.meta[Mark.WORKSPACE] = sum_node.meta.get(Mark.WORKSPACE, 0) + _bytes(value)
    return sum_node


def _copy(value: Any) -> torch.Tensor:
    with value.fake_mode:
        return value.clone()


def _is_made_in_backward(gradient: Any) -> bool:
    return (
        isinstance(gradient, fx.Node)
        and is_tensor(gradient)
        and gradient.op == "call_function"
        and gradient.meta[Mark.PHASE] in (Phase.BACKWARD, Phase.WEIGHT)
        and gradient.meta["val"].layout is torch.strided
    )


def _module(node: fx.Node) -> tuple[int, Phase]:
    return node.meta[Mark.STAGE], node.meta[Mark.PHASE]


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
    """Return whether a gradient uses all of its memory, and nothing outside its module refers to that memory.

    Args:
        gradient: a result of the backward.
        holders: all values that share its memory; empty if that was not allocated in the backward.
    """
    value = gradient.meta["val"]
    whole = value.untyped_storage().nbytes() == _bytes(value)
    readers = [user for node in holders for user in node.users if user.op != "output"]
    return (
        gradient in holders and bool(whole) and all(_module(node) == _module(gradient) for node in (*holders, *readers))
    )


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.dtype.itemsize
