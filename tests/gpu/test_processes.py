"""Pipelines over processes with a device each: one process's bits, and no stream that overtakes a message."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import roundpipe_fx
from roundpipe_fx.distributed.ranks import RemoteError
from roundpipe_fx.runtime.host_buffers import HostBuffers
from tests.distributed import parallel_layers as layers
from tests.distributed.models import MODELS, Net, language_loss, make
from tests.distributed.parallel_layers import WORDS, BreakingNet, PickingNet, picking_parallel, vocabulary_parallel
from tests.gpu.processes import on_devices
from tests.pipeline.steps import Blocks, squares

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA devices"),
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices"),
]


def _mesh(*names: str) -> DeviceMesh:
    sizes = (dist.get_world_size(),) if len(names) == 1 else (2, 2)
    return init_device_mesh("cuda", sizes, mesh_dim_names=names)


def _made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model, batch = make(name)
    return model.cuda(), {
        key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in batch.items()
    }


def _steps(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    torch.cuda.manual_seed(5)
    return [model.forward_backward(**batch) for _ in range(2)]


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _check_equal(name: str, **options: Any) -> None:
    model, batch = _made(name)
    plain = copy.deepcopy(model)
    device = torch.device("cuda", torch.cuda.current_device())
    if not options.keys() & {"memory_budget", "checkpoint"}:
        options["recompute"] = "none"  # ranks cannot know what is free on all devices
    options["stage_compiler"] = "eager"
    one_process = roundpipe_fx.compile(plain, devices=[device] * dist.get_world_size(), host_budget=0, **options)
    losses = _steps(one_process, batch)
    compiled = roundpipe_fx.compile(model, mesh=_mesh("pp"), **options)
    assert all(map(torch.equal, _steps(compiled, batch), losses)), name
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    for key, value in (*compiled.named_parameters(), *compiled.named_buffers()):
        assert torch.equal(value, expected[key]), key
        if expected[key].grad is not None:
            assert torch.equal(value.grad, expected[key].grad), key


def check_models(_rank: int) -> None:
    for name in MODELS:
        _check_equal(name, num_microbatches=4)


def check_schedules(_rank: int) -> None:
    for options in (
        {"schedule": "gpipe"},
        {"schedule": "interleaved"},
        {"schedule": "zero_bubble"},
        {"schedule": "zero_bubble", "memory_budget": 0.5},
        {"checkpoint": "except_last"},
        {"memory_budget": 0.0},
    ):
        _check_equal("net", num_microbatches=2 * dist.get_world_size(), **options)
    _check_equal("tied", num_microbatches=4, schedule="roundpipe")


def _gathered(value: Any) -> list[Any]:
    """A value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=dist.new_group(backend="gloo"))
    return values


def check_replicas(_rank: int) -> None:
    """Gradients are the mean of separate pipelines'; sharded parameters change no bit."""
    mesh = _mesh("dp", "pp")
    replica = mesh["dp"].get_local_rank()
    options = {"num_microbatches": 2, "stage_compiler": "eager", "recompute": "none", "schedule": "interleaved"}
    for name in ("net", "tied"):
        plain, batch = _made(name)
        own = {
            key: value.chunk(2)[replica] if isinstance(value, torch.Tensor) else value for key, value in batch.items()
        }
        alone = copy.deepcopy(plain)
        device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.manual_seed(5 + replica)
        separate = roundpipe_fx.compile(alone, devices=[device] * 2, **options)
        expected_loss = separate.forward_backward(**own)
        of_all = _gathered({key: value.grad.cpu() for key, value in alone.named_parameters()})
        means = {key: of_all[0][key] / 2 + of_all[2][key] / 2 for key in of_all[0]}
        for shard in (None, "dp"):
            model = roundpipe_fx.compile(copy.deepcopy(plain), mesh=mesh, shard=shard, **options)
            model.trace(**own)
            torch.cuda.manual_seed(5 + replica)
            assert torch.equal(model.forward_backward(**own), expected_loss), name
            for key, value in model.named_parameters():
                assert torch.equal(_whole(value.grad).cpu(), means[key]), (name, shard, key)
            optimizer = torch.optim.AdamW(model.parameters())
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            model.forward_backward(**own)


def check_budget(rank: int) -> None:
    """What the allocator counts in a step, received values and what is averaged included, is within the budget."""
    x = torch.randn(512, 128, device="cuda")
    mean = nn.functional.mse_loss
    for names, shard in ((("pp",), None), (("dp", "pp"), None), (("dp", "pp"), "dp")):
        peaks = []
        for share in (1.0, 0.3, 0.0):
            options = {"memory_budget": share, "tiling": "never", "dynamic": False, "stage_compiler": "eager"}
            torch.manual_seed(0)
            model = roundpipe_fx.compile(
                Net(width=128).cuda(), mesh=_mesh(*names), num_microbatches=4, shard=shard, **options
            )
            model.trace(x, labels=x, loss_fn=mean)
            found = []
            for _ in range(2):
                model.zero_grad()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                model.forward_backward(x, labels=x, loss_fn=mean)
                torch.cuda.synchronize()
                found.append(torch.cuda.max_memory_allocated() - before)
            assert max(found) <= model.plan.budget, (names, shard, share, rank, found, model.plan.budget)
            peaks.append(max(found))
        assert peaks[0] >= peaks[1] >= peaks[2]


def check_host(rank: int) -> None:
    """Values leave for the host if the user says how much may be there: the same bits, within both budgets."""
    x, y = torch.randn(2, 4096, 64, generator=torch.Generator().manual_seed(1))
    buffers: dict[int, HostBuffers] = {}
    take = HostBuffers.take

    def taken(self: HostBuffers, size: int) -> torch.Tensor:
        buffers[id(self)] = self
        return take(self, size)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HostBuffers, "take", taken)
        for names, shard in ((("pp",), None), (("dp",), None), (("dp", "pp"), None), (("dp", "pp"), "dp")):
            steps: list[list[torch.Tensor]] = []
            budget: float | int = 1.0
            sent = []
            for room in (None, 0, "64MiB"):
                torch.manual_seed(0)
                model = roundpipe_fx.compile(
                    Blocks(64, 8, dropout=0.1).cuda(),
                    mesh=_mesh(*names),
                    shard=shard,
                    num_microbatches=8,
                    memory_budget=budget,
                    host_budget=room,
                    tiling="never",
                    dynamic=False,
                    stage_compiler="eager",
                    schedule="gpipe",
                )
                model.trace(x.cuda(), labels=y.cuda(), loss_fn=squares)
                for outside in (False, True):
                    buffers.clear()
                    for _ in range(2):
                        model.zero_grad()
                        torch.cuda.manual_seed(5)
                        torch.cuda.synchronize()
                        torch.cuda.reset_peak_memory_stats()
                        before = torch.cuda.memory_allocated()
                        if outside:
                            loss = squares(model(x.cuda()), y.cuda())
                            loss.backward()
                        else:
                            loss = model.forward_backward(x.cuda(), labels=y.cuda(), loss_fn=squares)
                        torch.cuda.synchronize()
                        peak = torch.cuda.max_memory_allocated() - before - 2 * x.nbytes
                    steps.append([loss.detach(), *(_whole(value.grad) for _, value in model.named_parameters())])
                    if budget != 1.0:
                        assert peak <= model.plan.budget, (names, shard, room, outside, rank, peak, model.plan.budget)
                    in_use = sum(own.bytes for own in buffers.values())
                    assert in_use <= model.plan.host_bytes <= (2**26 if room else 0)
                    sent.append(model.plan.host_bytes)
                if budget == 1.0:
                    budget = max(model.plan.pipeline.peak_bytes) * 6 // 10
            for number, step in enumerate(steps):
                assert all(map(torch.equal, step, steps[number % 2])), (names, shard, number)
            assert not any(sent[:4]) and sent[4], (names, shard, rank, sent)


def check_parallel_layers(rank: int) -> None:
    """Tensor parallel stages: one device's gradients, and a stage that raises raises everywhere."""
    mesh = _mesh("pp", "tp")
    tokens = torch.randint(WORDS, (8, 8), generator=torch.Generator().manual_seed(1)).cuda()
    batch = {"tokens": tokens, "labels": tokens, "loss_fn": language_loss}
    options = {"num_microbatches": 4, "stage_compiler": "eager", "recompute": "none"}
    for make_plain, parallel in ((BreakingNet, vocabulary_parallel), (PickingNet, picking_parallel)):
        torch.manual_seed(0)
        plain = make_plain().cuda()
        model = roundpipe_fx.compile(parallel(copy.deepcopy(plain), mesh["tp"]), mesh=mesh, **options)
        model.trace(**batch)
        expected = roundpipe_fx.compile(plain, **options).forward_backward(**batch)
        for broken in (None, 1, 2):
            model.zero_grad()
            layers.Armed.call = 3 if rank == broken else None
            if broken is None:
                torch.testing.assert_close(model.forward_backward(**batch), expected)
                for name, value in model.named_parameters():
                    torch.testing.assert_close(_whole(value.grad), plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
            else:
                start = time.monotonic()
                with pytest.raises((ValueError, RemoteError), match="the stage of this rank is broken"):
                    model.forward_backward(**batch)
                assert time.monotonic() - start < 10
            layers.Armed.call = None
        torch.testing.assert_close(model.forward_backward(**batch), expected)


class Armed:
    """Whether the stages of this process raise."""

    now = False


def _breaking(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        if Armed.now:
            raise ValueError("the stage of this rank is broken")
        return module(*arguments)

    return call


def check_failures(rank: int) -> None:
    """A stage that raises on one rank: all ranks raise within ten seconds, and the next step runs."""
    _, batch = _made("net")
    for names in (("pp",), ("dp", "pp")):
        torch.manual_seed(0)
        model = roundpipe_fx.compile(
            Net().cuda(), mesh=_mesh(*names), num_microbatches=4, stage_compiler=_breaking, recompute="none"
        )
        model.trace(**batch)
        expected = _steps(model, batch)
        model.zero_grad()
        for broken in (1, 0):
            Armed.now = rank == broken
            start = time.monotonic()
            with pytest.raises((ValueError, RemoteError), match="the stage of this rank is broken"):
                model.forward_backward(**batch)
            assert time.monotonic() - start < 10
            Armed.now = False
        assert all(map(torch.equal, _steps(model, batch)[:1], expected[:1]))


def check_emulation(rank: int) -> None:
    """What would overtake a message on a device is a race here, and orders that NCCL never gets through do not end."""
    from tests.emulated_cuda.cuda_module import device

    x, y = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")

    def exchange(first: Callable[..., Any]) -> Any:
        return dist.isend(y, 1) if rank == 0 else first(x, 0)

    work = exchange(dist.irecv)
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"race: aten::add\S* on .* reads what recv writes"):
            x.add(1)
    else:
        with pytest.raises(RuntimeError, match=r"race: aten::add\S* on .* writes over what send reads"):
            y.add_(1)
    work.wait()
    assert torch.equal(x.add(1).cpu(), torch.full((4,), 1.0 + rank))
    assert len(device.races()) == 1
    crossing = dist.new_group(timeout=timedelta(seconds=5))
    works = [dist.isend(y, 1 - rank, group=crossing), dist.irecv(x, 1 - rank, group=crossing)]
    with pytest.raises(RuntimeError, match=r"[Tt]imed out|Connection"):  # the rank whose time is over first closes it
        works[0].wait()


@pytest.mark.skipif("emulated_cuda" not in os.environ.get("LD_PRELOAD", ""), reason="of the emulated NCCL")
def test_emulation(tmp_path: Path) -> None:
    on_devices(2, [check_emulation], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_pipelines(count: int, tmp_path: Path) -> None:
    on_devices(count, [check_models, check_schedules], tmp_path)


def test_replicas_and_sharded_parameters(tmp_path: Path) -> None:
    on_devices(4, [check_replicas], tmp_path)


@pytest.mark.long
def test_budgets(tmp_path: Path) -> None:
    on_devices(4, [check_budget], tmp_path)


@pytest.mark.long
def test_values_on_the_host(tmp_path: Path) -> None:
    on_devices(4, [check_host], tmp_path)


@pytest.mark.long
def test_parallel_layers(tmp_path: Path) -> None:
    on_devices(4, [check_parallel_layers], tmp_path)


def test_failures(tmp_path: Path) -> None:
    on_devices(4, [check_failures], tmp_path)
