"""Two processes: gradients are those of the same run without roundpipe_fx."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.processes import Check, in_two_processes


class Net(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

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
    "DDP between": (
        lambda model: _compiled(DistributedDataParallel(roundpipe_fx.compile(model))),
        DistributedDataParallel,
    ),
    "FSDP2 of it": (lambda model: _sharded(_compiled(model)), _sharded),
    "FSDP2 inside it": (lambda model: _compiled(_sharded(model)), _sharded),
    "FSDP2 of its blocks": (_per_block, lambda model: _sharded(model)),
}


def _gradients(wrapped: nn.Module, rank: int) -> list[torch.Tensor]:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
    wrapped(x).square().sum().backward()
    found = [parameter.grad for parameter in wrapped.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]


def _check_checkpoint(_rank: int, folder: str) -> None:
    """Each process saves its shards of a compiled model, and loads them into a model that is neither."""
    torch.manual_seed(0)
    model, loaded = Net(), Net()
    sharded = _sharded(_compiled(model))
    sharded(torch.randn(4, 16)).square().sum().backward()
    dcp.save(get_model_state_dict(sharded), checkpoint_id=f"{folder}/checkpoint")
    dcp.load(get_model_state_dict(loaded), checkpoint_id=f"{folder}/checkpoint")
    assert all(map(torch.equal, loaded.parameters(), (own.full_tensor() for own in model.parameters())))


def _check_gradients(rank: int, _folder: str) -> None:
    for name, (wrap, plain) in WAYS.items():
        torch.manual_seed(0)
        model = Net()
        expected = _gradients(plain(copy.deepcopy(model)), rank)
        wrapped = wrap(model)
        found = _gradients(wrapped, rank)
        assert all(map(torch.equal, found, expected)), name
        assert roundpipe_fx.plans(wrapped)[-1].training, name
        assert len(roundpipe_fx.plans(wrapped)) == 1 or name.startswith("FSDP2"), name


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="roundpipe_fx", options={"memory_budget": 0.5})
    return model


def _check_budget(_rank: int, _folder: str) -> None:
    """DDP does not cut the graph: what is measured is the plan of the whole step."""
    x = torch.randn(1024, 64)
    for compiled in (_compiled, _in_place):
        torch._dynamo.reset()
        model = Net(width=64, depth=6)
        buckets = sum(parameter.nbytes for parameter in model.parameters())
        wrapped = DistributedDataParallel(compiled(model), bucket_cap_mb=0.04)
        for step in range(3):
            wrapped.zero_grad()
            with roundpipe_fx.measure_peak("cpu") as peak:
                wrapped(x).square().sum().backward()
            (plan,) = roundpipe_fx.plans(wrapped)
            # In the second step DDP replaces its buckets: the meter counts new ones, but not that old ones are freed.
            assert plan.recompute_seconds > 0 and peak.bytes <= plan.budget + (buckets if step == 1 else 0)
            assert plan.bucket_bytes == buckets and "buckets of DistributedDataParallel: 97.5 KiB" in str(plan)


PIPELINES: list[dict[str, Any]] = [{"num_microbatches": 2}, {"num_microbatches": 4, "devices": ["cpu", "cpu"]}]
LOSS = nn.MSELoss()


def _call(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    LOSS(model(x), y).backward()


def _forward_backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    of_step = model.module if isinstance(model, DistributedDataParallel) else model
    loss, output = of_step.forward_backward(x, labels=y, loss_fn=LOSS, return_outputs=True)
    assert not loss.requires_grad and torch.allclose(loss, LOSS(output, y))


@torch.no_grad()
def _sums(terms: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [sum(of_one[1:], of_one[0]) for of_one in zip(*terms, strict=True)]


def _check_pipelined(rank: int, _folder: str) -> None:
    """Gradients are the mean of those that each process has alone, and add up where they are not synchronized."""
    batches = [tuple(torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(own))) for own in range(2)]
    for options, step in itertools.product(PIPELINES, (_call, _forward_backward)):
        torch.manual_seed(0)
        model = Net()
        alone = []
        for batch in batches:
            own = copy.deepcopy(model)
            step(roundpipe_fx.compile(own, **options), *batch)
            alone.append([parameter.grad for parameter in own.parameters()])
        mean = _sums([[gradient / 2 for gradient in own] for own in alone])
        # Small buckets: there are several.
        wrapped = DistributedDataParallel(roundpipe_fx.compile(model, **options), bucket_cap_mb=0.002)
        eager = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.002)
        _call(eager, *batches[rank])
        for _ in range(2):  # DDP rebuilds its buckets for the second step
            wrapped.zero_grad()
            step(wrapped, *batches[rank])
            found = [parameter.grad for parameter in model.parameters()]
            assert all(map(torch.equal, found, mean))
        torch.testing.assert_close(found, [parameter.grad for parameter in eager.parameters()])
        expected = _sums([found, alone[rank]])
        with wrapped.no_sync():
            step(wrapped, *batches[rank])
        assert all(map(torch.equal, [parameter.grad for parameter in model.parameters()], expected))


def _check_refused(_rank: int, _folder: str) -> None:
    with pytest.raises(ValueError, match=r"^num_microbatches .* but '1' is one\."):
        inside = nn.Sequential(nn.Linear(16, 16), DistributedDataParallel(Net()))
        roundpipe_fx.compile(inside, num_microbatches=2)
    with pytest.raises(TypeError, match="is compiled already"):
        _compiled(DistributedDataParallel(_compiled(Net())))
    x = torch.randn(4, 16)
    part = roundpipe_fx.compile(Net(), num_microbatches=2)
    whole = DistributedDataParallel(nn.Sequential(nn.Identity(), part))
    with pytest.raises(RuntimeError, match="around Sequential, of which this model is a part"):
        part.forward_backward(x, labels=x, loss_fn=LOSS)
    assert all(parameter.grad is None for parameter in part.parameters())
    with whole.no_sync():
        part.forward_backward(x, labels=x, loss_fn=LOSS)
    assert all(parameter.grad is not None for parameter in part.parameters())
    hooked = roundpipe_fx.compile(Net(), num_microbatches=2)
    hooked.register_forward_hook(lambda *_: None)
    wrapped = DistributedDataParallel(hooked)
    with pytest.raises(RuntimeError, match="its hooks would run for both"):
        wrapped.module.forward_backward(x, labels=x, loss_fn=LOSS)


@pytest.mark.long
@pytest.mark.parametrize(
    "checks",
    [[_check_gradients, _check_budget, _check_checkpoint], [_check_pipelined, _check_refused]],
    ids=["whole batches", "pipelines"],
)
def test_two_processes(checks: list[Check], tmp_path: Path) -> None:
    in_two_processes(checks, tmp_path)
