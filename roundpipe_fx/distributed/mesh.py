"""The user's mesh: its dimensions, and what else is given with it, checked before anything is traced.

::

    dimension    what is distributed along it
    "dp"         batches, over replicas; with ``shard="dp"`` parameters, gradients and the optimizer's state as well
    "pp"         the stages of a pipeline
    "tp"         the layers of each stage, by the model's own DTensors
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from roundpipe_fx.distributed.ownership import named_tensors
from roundpipe_fx.ir.options import Options
from roundpipe_fx.pipeline.settings import Pipelining

DATA = "dp"
"""Name of the mesh dimension over which batches are distributed."""

PIPELINE = "pp"
"""Name of the mesh dimension over which stages are distributed."""

TENSOR = "tp"
"""Name of the mesh dimension over which the layers of a stage are distributed, by the model's own DTensors."""


def devices_of(
    mesh: DeviceMesh, model: nn.Module, options: Options, checkpoint: Any = None, **others: Any
) -> list[str]:
    """The devices to plan for: one for each rank, all like this one's.

    Args:
        **others: options that contradict a mesh, with the values that the user gave.

    Raises:
        TypeError: ``mesh`` is no mesh.
        ValueError: the mesh, or an option beside it, is not supported.
    """
    check_mesh(mesh)
    for name, value in others.items():
        if value not in (None, False):
            raise ValueError(f"{name}={value!r} is not supported with a mesh.")
    # Measured seconds differ by noise, and ranks would cut the model differently.
    if options.cost == "measured":
        raise ValueError(
            "cost='measured' differs from rank to rank, and all ranks need the same plan: use cost='roofline'."
        )
    device = mesh.device_type
    if device != "cpu":
        device = f"{device}:{torch.accelerator.current_device_index()}"
        if options.memory_budget is None and options.recompute is None and checkpoint is None:
            raise ValueError(
                "memory_budget=None takes what is free on each rank's device, and all ranks need the same plan: give "
                "memory_budget=, checkpoint=, or recompute='none' for no limit."
            )
    for name, value in named_tensors(model):
        if value.device.type != "meta" and value.device != torch.device(device):
            raise ValueError(
                f"{name!r} lies on {str(value.device)!r}, and this rank's device is {device!r}: move the model there, "
                "or build it under torch.device('meta')."
            )
    return [device] * size_of(mesh, PIPELINE)


def check_shard(mesh: DeviceMesh | None, shard: str | None) -> None:
    """Check the option ``shard``.

    Raises:
        ValueError: it is unknown, or there is no dimension of that name.
    """
    if shard is None:
        return
    if shard != DATA:
        raise ValueError(f"shard={shard!r}: valid values are {DATA!r} and None.")
    if mesh is None or DATA not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"shard={shard!r} shards parameters across the replicas of a mesh, and there is no dimension {DATA!r}: "
            f"give mesh=init_device_mesh('cpu', (2,), mesh_dim_names=({DATA!r},))."
        )


def _check_parallel_layers(mesh: DeviceMesh, model: nn.Module, sharded: bool) -> int:
    """Check a model whose layers are distributed, or not, against the mesh.

    Args:
        sharded: whether parameters are sharded across replicas.

    Returns:
        over how many ranks layers are distributed.

    Raises:
        ValueError: they are distributed over other ranks than the mesh says, or what is not supported.
    """
    size = size_of(mesh, TENSOR)
    parallel = [(name, value) for name, value in named_tensors(model) if isinstance(value, DTensor)]
    if not parallel:
        if size > 1:
            raise ValueError(
                f"mesh has the dimension {TENSOR!r}, and no parameter of the model is a DTensor: call "
                f"torch.distributed.tensor.parallel.parallelize_module(model, mesh[{TENSOR!r}], …) first."
            )
        return 1
    # A mesh of one dimension alone is no submesh: ``mesh["tp"]`` would be the mesh itself, without stages or replicas.
    expected = mesh[TENSOR] if size > 1 and mesh.ndim > 1 else None
    for name, value in parallel:
        if expected is None or value.device_mesh != expected:
            raise ValueError(
                f"{name!r} is a DTensor on {value.device_mesh}. "
                "With mesh= layers are distributed over the mesh's dimension "
                f"{TENSOR!r}: parallelize_module(model, mesh[{TENSOR!r}], …), and "
                f"mesh=init_device_mesh('cpu', (2, 2), mesh_dim_names=({PIPELINE!r}, {TENSOR!r}))."
            )
        if value.device.type == "meta":
            raise ValueError(
                f"{name!r} is a DTensor on the meta device: models whose layers are distributed need memory before "
                "they are compiled with a mesh. Call model.to_empty(device=…) and initialize it after "
                "parallelize_module."
            )
        if not isinstance(value, nn.Parameter):
            raise ValueError(f"the buffer {name!r} is a DTensor; with mesh= only parameters are distributed.")
        # A partial sum is no value yet: a parameter must be whole or a shard.
        if any(placement.is_partial() for placement in value.placements):
            raise ValueError(f"the parameter {name!r} is placed as {value.placements}: give Shard or Replicate.")
    if sharded:
        raise ValueError(
            f"shard={DATA!r} is not supported for a model whose layers are distributed over {TENSOR!r}: leave it out."
        )
    return size


def set_mesh(pipelining: Pipelining, mesh: DeviceMesh, model: nn.Module, shard: str | None) -> Pipelining:
    """Make the setting of a step that is pipelined over the processes of a mesh.

    Args:
        pipelining: the user's, with a device for each rank of a pipeline.

    Raises:
        ValueError: layers are distributed over other ranks than the mesh says, or what is not supported.
    """
    replicas = size_of(mesh, DATA)
    sharded = shard is not None and replicas > 1
    parts = _check_parallel_layers(mesh, model, sharded)
    return dataclasses.replace(pipelining, replicas=replicas, sharded=sharded, tensor_parallel=parts)


def check_mesh(mesh: Any) -> None:
    """Check the user's mesh.

    Raises:
        TypeError: it is not a mesh.
        ValueError: it has neither a dimension ``"pp"`` nor ``"dp"``, or others that are larger than 1.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed DeviceMesh, not {type(mesh).__name__}.")
    names = mesh.mesh_dim_names or ()
    if PIPELINE not in names and DATA not in names:
        raise ValueError(
            f"mesh has no dimension {PIPELINE!r}, over which stages are distributed, and none {DATA!r}, over which "
            f"batches are; it has {list(names)}: init_device_mesh('cpu', (2,), mesh_dim_names=('{PIPELINE}',))."
        )
    # Dimensions of size 1 change nothing and are allowed.
    others = [name for name in names if name not in (PIPELINE, DATA, TENSOR) and mesh[name].size() > 1]
    if others:
        raise ValueError(
            f"mesh has the dimension {others[0]!r}; {PIPELINE!r}, {DATA!r} and {TENSOR!r} are supported: give "
            f"mesh[{PIPELINE!r}], and reduce the gradients over the other dimensions between forward_backward and the "
            "optimizer's step."
        )


def size_of(mesh: DeviceMesh, name: str) -> int:
    """Size of a dimension of a mesh; 1, if it has none of that name."""
    return mesh[name].size() if name in (mesh.mesh_dim_names or ()) else 1
