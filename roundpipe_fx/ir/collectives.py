"""Collectives: operations that all processes of a group run, in the same order, or all of them wait for ever.

Processes plan on their own, and plans may differ: shards are uneven, devices have different memory. So communication
must not depend on what is recomputed, and when. A collective of the forward runs once, in the forward. Only where one
plan is made for all ranks, as for a mesh on paper, may it run again.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph, input_nodes, tensor_values
from roundpipe_fx.ir.source import find_source
from roundpipe_fx.torch_private import PassedThrough, group_ranks, is_opaque, size_hint

_NAMESPACES = frozenset(
    ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "c10d_functional", "symm_mem")
)
"""Of the operators of functional collectives, DTensor, process groups and symmetric memory."""


def is_collective(target: Any) -> TypeGuard[torch._ops.OpOverload]:
    """Return whether a node's target communicates with other processes, or waits for communication."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES


_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd")
_WITHOUT_COPIES = frozenset(("all_reduce", "all_reduce_", "broadcast", "broadcast_", "all_to_all_single"))
_WAIT = "wait_tensor"


def is_functional_collective(target: Any) -> TypeGuard[torch._ops.OpOverload]:
    """Return whether a node's target is a functional collective, or waits for one."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _FUNCTIONAL


def starts_collective(target: Any) -> bool:
    """Return whether a node's target communicates with other processes, and does not only wait for communication."""
    return is_collective(target) and not target._schema.name.endswith(f"::{_WAIT}")


def collective_name(node: fx.Node) -> str:
    """The name of a collective's operator, without its namespace."""
    name: str = node.target._schema.name  # type: ignore[union-attr]
    return name.partition("::")[2]


def group_of(node: fx.Node) -> list[int]:
    """The ranks that run a collective; empty where this process has no such group.

    Args:
        node: a call of a functional collective, or of DTensor's own.
    """
    group = group_argument(node.target, node.args, node.kwargs)
    return group_ranks(group) if group is not None else []


def group_argument(target: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """The argument that names the group in a call of a collective; ``None`` if there is none.

    Args:
        arguments: of the call, by position.
        options: of the call, by name.
    """
    names = (argument.name for argument in target._schema.arguments)
    return {**dict(zip(names, arguments, strict=False)), **options}.get("group_name")


def copied_bytes(node: fx.Node) -> int:
    """Bytes that processes copy for a functional collective, besides its results.

    Gloo, on the CPU, gathers into a copy of the results and reduces a copy of the operands, and frees them in a thread
    of its own when communication is over. So what a step can observe of that differs from rank to rank and from step to
    step: this is an upper bound. NCCL copies nothing.

    Args:
        node: a call of a functional collective, or one that waits for it.
    """
    name = collective_name(node)
    operands = input_nodes(node)
    if name == _WAIT:
        # A wait has the copies of the collective whose result it reads; an item of a tuple leads to that call.
        (source,) = operands
        if source.target is operator.getitem:
            (source,) = input_nodes(source)
        return copied_bytes(source) if is_functional_collective(source.target) else 0
    if name in _WITHOUT_COPIES:
        return 0
    # A gather copies its results besides; the others copy only what they send.
    values = [value for operand in operands for value in tensor_values(operand)]
    values += tensor_values(node) if "gather" in name else []
    return sum(size_hint(value.numel() * value.element_size()) for value in values if value.device.type == "cpu")


class DistributedTensorError(PassedThrough, ValueError):
    """A model that is distributed over processes cannot be pipelined by threads."""


def refuse_distributed(joint: JointGraph, workers: int) -> None:
    """Refuse graphs that a pipeline cannot run.

    Args:
        workers: number of devices, each with a thread.

    Raises:
        DistributedTensorError: parameters are distributed tensors; or several threads would start collectives.
    """
    # One process with distributed tensors: AOTAutograd's part that unwraps them does not run in a pipeline.
    if any(is_opaque(node.meta.get("val")) for node in joint.primals):
        raise DistributedTensorError(
            "a pipeline cannot run a model whose parameters are distributed tensors (DTensor) in one process. Give "
            "mesh= with a dimension 'tp', or compile it without devices and num_microbatches; a memory_budget works "
            "with tensor parallelism."
        )
    collective = next((node for node in joint.computed() if is_collective(node.target)), None)
    if collective is not None and workers > 1:
        raise DistributedTensorError(
            f"a pipeline of several devices cannot run {collective.target}: its devices run at the same time, so "
            "processes would communicate in different orders and wait for each other for ever. Give one device to "
            f"each process of the group.\n{find_source(collective)}"
        )


def refuse_other_groups(joint: JointGraph, ranks: int) -> None:
    """Refuse to plan graphs that communicate over other groups than the devices that run a stage together.

    Args:
        ranks: how many devices these are.

    Raises:
        DistributedTensorError: a collective runs on more or fewer.
    """
    for node in joint.computed():
        # A group of one rank communicates with nobody, and an operator without a group has none to check.
        group_size = len(group_of(node)) if is_collective(node.target) else 0
        if group_size not in (0, 1, ranks):
            raise DistributedTensorError(
                f"{node.target} communicates over {group_size} ranks, and a stage is planned for {ranks} devices: of a "
                "mesh only the dimension of tensor parallelism may communicate within the model. What replicas share "
                f"out is said by mesh_shape= and shard= instead.\n{find_source(node)}"
            )
