"""Models that are distributed over processes before they are compiled: by ``parallelize_module`` or ``fully_shard``.

A pipeline bypasses the part of AOTAutograd that unwraps distributed tensors, and its threads would start collectives in
a different order in each process. Over processes with one worker each stages may be tensor parallel
(:mod:`roundpipe_fx.distributed.process_pipeline`).

The gradient of a parameter may be placed in another way than the parameter. Autograd redistributes it where it
accumulates, which no pipeline runs; so an identity is traced behind each such parameter, whose backward does::

    weight (replicated) ──▶ identity ──▶ norm over a part of the sequence
    gradient (replicated) ◀── all-reduce ◀── gradient (sums, a part on each rank)

A plan for a machine elsewhere traces the program of this process's rank, which has collectives where PyTorch puts them,
and the shapes of its shards. No other process is needed for that: with the backend ``"fake"`` there is a group of any
size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from roundpipe_fx.ir.collectives import DistributedTensorError
from roundpipe_fx.torch_private import parts_sharded_alone


def redistribute_gradients(module: fx.GraphModule) -> None:
    """Let gradients of distributed tensors be placed as these are, in place.

    A layer may leave a gradient as sums of which each rank has a part, as that of a norm over parts of a sequence is.
    How it is placed is known to autograd alone, which a pipeline bypasses.
    """
    changed = False
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, DTensor) and value.requires_grad:
            # An identity whose backward redistributes: inserted behind each distributed parameter.
            with module.graph.inserting_after(node):
                placed = module.graph.call_function(_keep_gradient_placement, (node,))
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


def _keep_gradient_placement(value: DTensor) -> torch.Tensor:
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


def tensor_parallel_ranks(model: nn.Module) -> int:
    """Number of ranks over which a model's layers are sharded; 1: its parameters are no DTensors.

    Args:
        model: as ``parallelize_module`` has left it.

    Raises:
        ValueError: they are DTensors of other kinds, which a plan cannot place.
    """
    meshes = {tensor.device_mesh for tensor in model.parameters() if isinstance(tensor, DTensor)}
    if not meshes:
        return 1
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "plan() was given a model that fully_shard shards. Give the model without it, and mesh_shape= with "
            "shard='dp': its parameters are then sharded across replicas."
        )
    sizes = {mesh.size() for mesh in meshes}
    if len(sizes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
        shapes = ", ".join(sorted({str(tuple(mesh.shape)) for mesh in meshes}))
        raise ValueError(
            f"the model's parameters are DTensors on meshes of the shapes {shapes}: plan() knows one dimension of "
            "tensor parallelism. Call parallelize_module with that dimension of the mesh, mesh['tp'], and give the "
            "other dimensions as mesh_shape=(dp, pp, tp)."
        )
    kinds = {mesh.device_type for mesh in meshes} - {"cpu"}
    if kinds:
        raise ValueError(
            f"the model's parameters are DTensors on a mesh of {min(kinds)!r} devices, and plan() traces on the CPU, "
            "for any device: parallelize the model with init_device_mesh('cpu', …)."
        )
    return min(sizes)


def check_tensor_parallel(ranks: int, mesh_shape: object, requested: int | None, alone: str) -> None:
    """Check that the arguments of ``plan`` match the tensor parallelism of the model.

    Args:
        ranks: number of tensor-parallel ranks of the model; 1 without DTensors.
        requested: number that ``mesh_shape`` names; ``None`` if it names none.
        alone: an option that excludes tensor parallelism; empty if there is none.

    Raises:
        ValueError: they contradict each other.
    """
    if ranks > 1 and alone:
        raise ValueError(
            f"{alone} is for models whose layers are whole on a device, and this one's parameters are DTensors over "
            f"{ranks} devices. Give mesh_shape=(dp, pp, {ranks})."
        )
    if requested is None or requested == ranks:
        return
    if ranks == 1:
        raise ValueError(
            f"mesh_shape={mesh_shape!r}: {requested} devices are to hold a shard of each layer, and "
            "no parameter of the model is a DTensor. "
            "Call torch.distributed.tensor.parallel.parallelize_module first. No other process is needed for it: "
            f"torch.distributed.init_process_group('fake', rank=0, world_size={requested})."
        )
    raise ValueError(
        f"mesh_shape={mesh_shape!r}: the model's parameters are DTensors over {ranks} devices. "
        f"Give that number as the size of the dimension 'tp', the last one: mesh_shape=(dp, pp, {ranks})."
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replace_local_tensors(fake: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that replaces the local tensors of DTensors, and other tensors themselves."""

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return fake(tensor)
        dtensor = DTensor.from_local(
            fake(tensor.to_local().detach()),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        return dtensor.requires_grad_(tensor.requires_grad)

    return replaced
