"""Tensor parallelism in one dimension of a mesh, FSDP2 in the other: the bits of aot_eager, and budgets that hold."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import roundpipe_fx
from tests.processes import in_processes
from tests.trainers.test_tensor_parallel import WIDTH, Net, sequence_parallel, tensor_parallel


def _whole(model: nn.Module, mesh: dist.DeviceMesh) -> Any:
    return fully_shard(model, mesh=mesh)


def _in_parts(model: Any, mesh: dist.DeviceMesh) -> Any:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _step(run: Any, model: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    model.zero_grad()
    with roundpipe_fx.measure_peak("cpu") as peak:
        loss = run(x).square().mean()
        loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *(own.full_tensor() if isinstance(own, DTensor) else own for own in grads)], peak.bytes


def check_gradients_and_budgets(_rank: int, _folder: str) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    batch = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    x = torch.randn(4, 32, WIDTH, generator=batch)
    for parallel, shard in ((tensor_parallel, _in_parts), (sequence_parallel, _whole)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Net()
        reference = shard(parallel(copy.deepcopy(net), mesh["tensor"]), mesh["data"])
        aot_eager = torch.compile(reference, backend="aot_eager")
        _step(aot_eager, reference, x)
        expected, most = _step(aot_eager, reference, x)
        torch._dynamo.reset()
        model = shard(parallel(copy.deepcopy(net), mesh["tensor"]), mesh["data"])
        refused = roundpipe_fx.compile(model, memory_budget=1, tiling="never")
        with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as error:
            refused(x).square().mean().backward()
        least = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
        dist.all_gather(least, torch.tensor([error.value.minimum]))
        assert len(set(map(int, least))) == 1, "ranks differ in what they need at the least"
        for budget in (0.0, error.value.minimum):
            torch._dynamo.reset()
            model = parallel(copy.deepcopy(net), mesh["tensor"])
            if budget:
                model = shard(roundpipe_fx.compile(model, memory_budget=budget, tiling="never"), mesh["data"])
            else:
                model = roundpipe_fx.compile(shard(model, mesh["data"]), memory_budget=budget)
            steps = [_step(model, model, x) for _ in range(3)]
            for found, _ in steps:
                assert all(map(torch.equal, found, expected)), (parallel, shard, budget)
            # Gloo's thread may let go of a buffer late.
            assert min(peak for _, peak in steps) <= (budget or most)
            assert roundpipe_fx.plans(model)[-1].gathered_bytes > 0


@pytest.mark.long
def test_four_processes(tmp_path: Path) -> None:
    in_processes(4, [check_gradients_and_budgets], tmp_path)
