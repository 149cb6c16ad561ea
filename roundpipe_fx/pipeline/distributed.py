"""Models that are distributed over processes, which a pipeline of threads in each process cannot run.

A pipeline bypasses the part of AOTAutograd that unwraps distributed tensors, and its threads would start collectives in
a different order in each process. Over processes with one worker each stages may be tensor parallel
(:mod:`roundpipe_fx.pipeline.over_processes`), and models can be planned for a machine elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from roundpipe_fx.ir.collectives import group_of, is_collective
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.source import source_of
from roundpipe_fx.torch_private import PassedThrough, is_opaque, parts_sharded_alone

__all__ = [
    "DistributedTensorError",
    "place_gradients",
    "refuse_distributed",
    "refuse_other_groups",
    "refuse_sharded_parts",
    "refuse_sharded_step",
]


class DistributedTensorError(PassedThrough, ValueError):
    """A model that is distributed over processes cannot be pipelined by threads."""


def place_gradients(module: fx.GraphModule) -> None:
    """Let gradients of distributed tensors be placed as these are, in place.

    A layer may leave a gradient as sums of which each rank has a part, as that of a norm over parts of a sequence is.
    How it is placed is known to autograd alone, which a pipeline bypasses.

    Args:
        module: Dynamo's graph.
    """
    changed = False
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, DTensor) and value.requires_grad:
            with module.graph.inserting_after(node):
                placed = module.graph.call_function(_with_placed_gradient, (node,))
            placed.meta.update(node.meta)
            node.replace_all_uses_with(placed, lambda user, placed=placed: user is not placed)
            changed = True
    if changed:
        module.recompile()


class _PlacedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: DTensor) -> torch.Tensor:
        ctx.placements = value.placements
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> torch.Tensor:
        return gradient.redistribute(placements=ctx.placements)


def _with_placed_gradient(value: DTensor) -> torch.Tensor:
    placed: torch.Tensor = _PlacedGradient.apply(value)
    return placed


def refuse_sharded_parts(model: nn.Module) -> None:
    """Refuse to pipeline a model of which FSDP2 shards parts on their own.

    Raises:
        DistributedTensorError: it does.
    """
    parts = parts_sharded_alone(model)
    if parts:
        raise DistributedTensorError(
            f"a pipeline cannot run a model of which parts are sharded on their own, {parts[0]!r} among {len(parts)}: "
            "fully_shard gathers their parameters in hooks, which cannot be traced. Shard the model as a whole "
            "(fully_shard(model) alone), or compile it without devices and num_microbatches; a memory_budget works "
            "with parts that are sharded."
        )


def refuse_sharded_step(model: nn.Module) -> None:
    """Refuse ``forward_backward`` of a model that FSDP2 shards, whose parameters only a call gathers.

    Raises:
        DistributedTensorError: it is sharded.
    """
    refuse_sharded_parts(model)
    if isinstance(model, FSDPModule):
        raise DistributedTensorError(
            "forward_backward of a model that fully_shard shards: its parameters are gathered when it is called. Call "
            "it, and loss.backward(); microbatches are pipelined there too."
        )


def refuse_distributed(joint: JointGraph, workers: int) -> None:
    """Refuse graphs that a pipeline cannot run.

    Args:
        joint: the captured graph.
        workers: number of devices, each with a thread.

    Raises:
        DistributedTensorError: parameters are distributed tensors; or several threads would start collectives.
    """
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
            f"each process of the group.\n{source_of(collective)}"
        )


def refuse_other_groups(joint: JointGraph, ranks: int) -> None:
    """Refuse to plan graphs that communicate over other groups than the devices that run a stage together.

    Args:
        joint: the captured graph.
        ranks: how many devices these are.

    Raises:
        DistributedTensorError: a collective runs on more or fewer.
    """
    for node in joint.computed():
        group_size = len(group_of(node)) if is_collective(node.target) else 0
        if group_size not in (0, 1, ranks):
            raise DistributedTensorError(
                f"{node.target} communicates over {group_size} ranks, and a stage is planned for {ranks} devices: of a "
                "mesh only the dimension of tensor parallelism may communicate within the model. What replicas share "
                f"out is said by mesh_shape= and shard= instead.\n{source_of(node)}"
            )
