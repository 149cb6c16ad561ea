"""Parameters and state of a compiled module whose stages run in several processes: its own rank's only.

Each process has the whole module, and the plan says which tensors are its own. With a tied embedding on two ranks::

    rank 0   embed.weight  layers.0.*                          parameters(), state_dict(), load(), save(): these
    rank 1                             layers.1.*  embed.weight
             norm of all gradients: each tensor is counted by one rank, each part of a sharded one by its own

Before the first plan it is not known which these are, and whatever needs to know raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from roundpipe_fx.distributed.agreement import all_or_none
from roundpipe_fx.distributed.files import Fill, initialize, load_files, load_tensors, save_files
from roundpipe_fx.distributed.group import PipelineGroup
from roundpipe_fx.distributed.mesh import DATA
from roundpipe_fx.distributed.ownership import named_tensors
from roundpipe_fx.distributed.process_pipeline import ProcessPipeline
from roundpipe_fx.distributed.sharded_parameters import is_to_average
from roundpipe_fx.ir.options import Options
from roundpipe_fx.pipeline.settings import Pipelining
from roundpipe_fx.torch_private import local_part

T = TypeVar("T", bound=torch.Tensor)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+|(?<=cuda:)\d+|(?<=index=)\d+")


def process_pipeline(
    model: nn.Module, mesh: DeviceMesh, options: Options, pipelining: Pipelining, **others: Any
) -> ProcessPipeline:
    """This rank's part in a pipeline over processes.

    Args:
        **others: more that is to be the same on all ranks.
    """
    # Addresses and device numbers differ between ranks and mean nothing: they are taken out of the texts that are
    # compared.
    text = _ADDRESS.sub("", ", ".join(map(str, (options, pipelining, *others.items()))))
    shard_mesh = None
    if pipelining.sharded:
        shard_mesh = mesh[DATA] if mesh.ndim > 1 else mesh
    return ProcessPipeline(model, PipelineGroup(mesh), text, shard_mesh, options.memory_budget is not None)


def select_own(processes: ProcessPipeline, named: Iterator[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Tensors that this rank owns.

    Raises:
        RuntimeError: nothing is planned yet.
    """
    _check_planned(processes)
    return ((name, value) for name, value in named if processes.ownership.owns(value))


def _check_planned(processes: ProcessPipeline) -> None:
    if processes.ownership.owners is None:
        raise RuntimeError(
            "which parameters this rank has is known once the model is planned: call model.trace(**batch) first, with "
            "the inputs of a step, labels or loss_fn included."
        )


def load(processes: ProcessPipeline, path: str | Path, fill: Fill | None) -> None:
    """Read what this rank owns from files."""
    _check_planned(processes)
    seed = _seed(processes)
    with all_or_none(processes.group.everyone, "load the model"):
        load_files(processes.ownership, path, fill, seed)
    _share(processes)


def save(processes: ProcessPipeline, path: str | Path) -> None:
    """Write what this rank owns to files.

    Raises:
        NotImplementedError: layers are distributed over ranks.
    """
    _check_planned(processes)
    if processes.ownership.parallel:
        raise NotImplementedError(
            "save() writes whole tensors, and layers of this model are distributed over ranks: use "
            "torch.distributed.checkpoint, dcp.save(model.state_dict(), checkpoint_id=…)."
        )
    save_files(processes.ownership, processes.group, path)


def initialize_own_tensors(processes: ProcessPipeline, fill: Fill) -> None:
    """Let a function write what this rank owns."""
    _check_planned(processes)
    seed = _seed(processes)
    with all_or_none(processes.group.everyone, "initialize the model"):
        initialize(processes.ownership, fill, seed)
    _share(processes)


def _share(processes: ProcessPipeline) -> None:
    """Replicas get what the first one has read or initialized: ``fill`` may differ, as random numbers do."""
    processes.replication.share_tensors(value for _, value in processes.ownership.named())


def _seed(processes: ProcessPipeline) -> int:
    """That of the first rank, on all."""
    seed: int = processes.group.everyone.share(torch.initial_seed(), 0)
    return seed


def select_own_state(processes: ProcessPipeline, state: Any, prefix: str) -> Any:
    """A state dict without the tensors of other ranks."""
    _check_planned(processes)
    for name, value in named_tensors(processes.ownership.model):
        if not processes.ownership.owns(value):
            state.pop(prefix + name, None)
    return state


def load_own_state(processes: ProcessPipeline, state: Mapping[str, Any], strict: bool) -> Any:
    """Copy what this rank owns from a state dict, which may have more.

    Raises:
        RuntimeError: it lacks something, or has what the model does not.
    """
    _check_planned(processes)
    model = processes.ownership.model
    known = model.state_dict(keep_vars=True).keys()
    here = set(processes.ownership.names())
    missing = [name for name in known if name in here and name not in state]
    unexpected = [name for name in state if name not in known]
    if strict and (missing or unexpected):
        raise RuntimeError(f"state_dict: missing on this rank: {missing}; not in the model: {unexpected}.")
    load_tensors(processes.ownership, state)
    return nn.Identity().load_state_dict({})._replace(missing_keys=missing, unexpected_keys=unexpected)


def clip_gradients(processes: ProcessPipeline, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale this rank's gradients so that the norm of all ranks' is at most ``max_norm``; returns the norm."""
    _check_planned(processes)
    ownership, group = processes.ownership, processes.group
    named = dict(ownership.model.named_parameters())
    owned = [(name, value) for name, value in named.items() if ownership.owns(value) and value.grad is not None]
    if any(value.grad is not None and is_to_average(value.grad) for _, value in owned):
        raise RuntimeError(
            "gradients of steps inside no_sync() are not averaged yet, and with shard='dp' their norm is not known: "
            "run a step outside of it before clip_grad_norm_."
        )
    # Norms of parts that no other rank counts; a parameter in parts has one norm per part, combined below.
    counted = {
        name: torch.linalg.vector_norm(_local(value.grad), norm_type).cpu()
        for name, value in owned
        if value.grad is not None and _local(value.grad).numel() and _counts(processes, ownership.traced(value))
    }
    ranks = group.sharers if ownership.shards.mesh is None else group.everyone
    parts: dict[str, list[torch.Tensor]] = {}
    for counted_there in ranks.gather(counted):
        for name, norm in counted_there.items():
            parts.setdefault(name, []).append(norm)
    norms = {
        name: part_norms[0] if len(part_norms) == 1 else torch.linalg.vector_norm(torch.stack(part_norms), norm_type)
        for name, part_norms in parts.items()
    }
    if not norms:
        return torch.zeros(())
    # In the model's order: the bits do not depend on the ranks.
    total = torch.linalg.vector_norm(torch.stack([norms[name] for name in named if name in norms]), norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, value in owned:
        if value.grad is not None:
            _local(value.grad).mul_(scale.to(value.grad.device))
    return total


def _counts(processes: ProcessPipeline, value: torch.Tensor) -> bool:
    """Return whether this rank's part of a parameter that it owns is one that no other rank counts."""
    owners, shards, group = processes.ownership.owners or {}, processes.ownership.shards, processes.group
    in_parts = shards.mesh is None or id(value) in shards.by_traced
    in_layer = any(
        local_part(dtensor) is value and dtensor.placements[0].is_shard() for dtensor in processes.ownership.parallel
    )
    once = (in_parts or group.replica == 0) and (in_layer or group.part == 0)
    return min(owners[id(value)]) == group.rank and once


def _local(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    rows: torch.Tensor = value.to_local() if isinstance(value, DTensor) else value
    return rows
