"""Two processes: gradients are those of the same run without roundpipe_fx."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import roundpipe_fx


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _compiled(model: nn.Module) -> nn.Module:
    return roundpipe_fx.compile(model, memory_budget=0.5)


def _sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    return model


def _per_block(model: nn.Module) -> nn.Module:
    for index, layer in enumerate(model.layers):
        model.layers[index] = _sharded(_compiled(layer))
    return _sharded(model)


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "DDP around it": (lambda model: DistributedDataParallel(_compiled(model)), DistributedDataParallel),
    "DDP inside it": (lambda model: _compiled(DistributedDataParallel(model)), DistributedDataParallel),
    "FSDP2 of it": (lambda model: _sharded(_compiled(model)), _sharded),
    "FSDP2 inside it": (lambda model: _compiled(_sharded(model)), _sharded),
    "FSDP2 of its blocks": (_per_block, lambda model: _sharded(model)),
}


def _gradients(wrapped: nn.Module, rank: int) -> list[torch.Tensor]:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
    wrapped(x).square().sum().backward()
    found = [parameter.grad for parameter in wrapped.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]


def _saved_and_loaded(folder: str) -> None:
    """Each process saves its shards of a compiled model, and loads them into a model that is neither."""
    torch.manual_seed(0)
    model, loaded = Net(), Net()
    sharded = _sharded(_compiled(model))
    sharded(torch.randn(4, 16)).square().sum().backward()
    dcp.save(get_model_state_dict(sharded), checkpoint_id=folder)
    dcp.load(get_model_state_dict(loaded), checkpoint_id=folder)
    assert all(map(torch.equal, loaded.parameters(), (own.full_tensor() for own in model.parameters())))


def _process(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        for name, (wrap, plain) in WAYS.items():
            torch.manual_seed(0)
            model = Net()
            expected = _gradients(plain(copy.deepcopy(model)), rank)
            wrapped = wrap(model)
            found = _gradients(wrapped, rank)
            assert all(map(torch.equal, found, expected)), name
            assert roundpipe_fx.plans(wrapped)[-1].training, name
        _saved_and_loaded(f"{folder}/checkpoint")
        dist.barrier()  # a process that left now would reset connections that the other still reads
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_data_parallel(tmp_path: Path) -> None:
    # A file, not a port: another test may take the port, and a server of keys may leave before its clients.
    torch.multiprocessing.spawn(_process, (str(tmp_path),), nprocs=2)
