"""Pipelines whose stages are tensor parallel: the results of one process, to rounding."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import roundpipe_fx
from roundpipe_fx.distributed.ranks import RanksDifferError, RemoteError
from tests.distributed.models import language_loss, make
from tests.distributed.parallel_layers import (
    WORDS,
    Armed,
    BreakingNet,
    Net,
    PickingNet,
    picking_parallel,
    sequence_parallel,
    tensor_parallel,
    vocabulary_parallel,
)
from tests.processes import in_processes


def as_it_is(module: torch.fx.GraphModule, _examples: Any) -> Callable[..., Any]:
    """A stage compiler that compiles nothing."""
    return module.forward


def parallel_llama(model: Any, mesh: DeviceMesh) -> Any:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def _batch() -> dict[str, Any]:
    tokens = torch.randint(WORDS, (8, 8), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens, "labels": tokens, "loss_fn": language_loss}


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _meshes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))


def _eager_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    if "loss_fn" in batch:
        return batch["loss_fn"](model(batch["tokens"]), batch["labels"])
    return model(**batch).loss


def _check(
    plain: nn.Module,
    parallel: Callable[[Any, DeviceMesh], Any],
    batch: dict[str, Any],
    mesh: DeviceMesh,
    **options: Any,
) -> Any:
    """Two steps with an optimizer are those of one process, to rounding; returns the model.

    In float64: AdamW's first step has the size of the learning rate whatever a gradient's, so it magnifies rounding.
    """
    plain = plain.double()
    model = parallel(copy.deepcopy(plain), mesh["tp"])
    found = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=4, schedule="1f1b", **options)
    found.trace(**batch)
    names = {name for name, _ in found.named_parameters()}
    assert 0 < len(names) < len(dict(plain.named_parameters()))
    assert any(isinstance(value, DTensor) for value in found.parameters())
    optimizers = [torch.optim.AdamW(own.parameters(), lr=0.01) for own in (plain, found)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss := _eager_loss(plain, batch)).backward()
        losses = [loss.detach(), found.forward_backward(**batch)]
        norms = [nn.utils.clip_grad_norm_(plain.parameters(), 1.0), found.clip_grad_norm_(1.0)]
        torch.testing.assert_close(*losses, rtol=1e-7, atol=0)
        torch.testing.assert_close(*norms, rtol=1e-7, atol=0)
        for name, value in found.named_parameters():
            gradient = plain.get_parameter(name).grad
            assert value.grad is not None and gradient is not None, name
            torch.testing.assert_close(_whole(value.grad), gradient, rtol=1e-6, atol=1e-9)
        for optimizer in optimizers:
            optimizer.step()
    for name, value in found.named_parameters():
        torch.testing.assert_close(_whole(value.detach()), plain.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, names)
    assert set().union(*everywhere) == set(dict(plain.named_parameters()))
    return found


def _net(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(dropout)


def check_layouts(_rank: int, _folder: str) -> None:
    for parallel in (tensor_parallel, sequence_parallel, vocabulary_parallel):
        _check(_net(), parallel, _batch(), _meshes())


def check_sizes_that_depend_on_data(_rank: int, _folder: str) -> None:
    torch.manual_seed(0)
    for compiler in ("eager", as_it_is):
        _check(PickingNet(), picking_parallel, _batch(), _meshes(), stage_compiler=compiler)


def check_compiled_stages(_rank: int, _folder: str) -> None:
    _check(_net(), vocabulary_parallel, _batch(), _meshes(), stage_compiler="inductor")
    torch.manual_seed(0)
    _check(PickingNet(), picking_parallel, _batch(), _meshes(), stage_compiler="inductor")


def check_transformers(_rank: int, _folder: str) -> None:
    model, batch = make("llama")
    _check(model, parallel_llama, batch, _meshes())


def check_dropout_and_budget(_rank: int, _folder: str) -> None:
    """Ranks of a stage draw alike, whatever their seeds; what each allocates in a step is within the budget."""
    mesh = _meshes()
    model = roundpipe_fx.compile(tensor_parallel(_net(0.3), mesh["tp"]), mesh=mesh, num_microbatches=2)
    torch.manual_seed(dist.get_rank())
    losses = [model.forward_backward(**_batch()) for _ in range(2)]
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, (losses, torch.get_rng_state()))
    assert all(found[0][0] == own and torch.equal(found[0][1], state) for own, state in found)
    gradients = {name: _whole(value.grad).clone() for name, value in model.named_parameters()}
    parts: list[Any] = [None] * 4
    dist.all_gather_object(parts, gradients)
    assert all(torch.equal(parts[place][name], value) for place in (0, 2) for name, value in parts[place + 1].items())
    peaks = []
    for share in (1.0, 0.0):
        options = {"memory_budget": share, "dynamic": False, "tiling": "never"}
        model = roundpipe_fx.compile(tensor_parallel(_net(), mesh["tp"]), mesh=mesh, num_microbatches=4, **options)
        batch = {**_batch(), "tokens": _batch()["tokens"].repeat(4, 2)}
        batch["labels"] = batch["tokens"]
        model.trace(**batch)
        measured = []
        for _ in range(5):
            model.zero_grad()
            with roundpipe_fx.measure_peak("cpu") as peak:
                model.forward_backward(**batch)
            measured.append(peak.bytes)
        # A thread of gloo gives operands back only after it has woken those who wait, later still on a busy machine.
        assert min(measured) <= model.plan.budget, (share, measured, model.plan.budget)
        peaks.append(model.plan.budget)
    assert peaks[0] > peaks[1]


def check_replicas(rank: int, _folder: str) -> None:
    """Gradients are the mean over replicas, each of which has a batch of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica = mesh["dp"].get_local_rank()
    tokens = _batch()["tokens"]
    plain = _net()
    model = sequence_parallel(copy.deepcopy(plain), mesh["tp"])
    language_loss(plain(tokens), tokens).backward()
    found = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=2)
    own = tokens.chunk(2)[replica]
    found.trace(own, labels=own, loss_fn=language_loss)
    for _ in range(2):
        found.zero_grad()
        found.forward_backward(own, labels=own, loss_fn=language_loss)
    for name, value in found.named_parameters():
        torch.testing.assert_close(_whole(value.grad), plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def check_calls_and_checkpoints(_rank: int, folder: str) -> None:
    """A call and its backward; a checkpoint is loaded by the model, and by a model in one process."""
    mesh, batch = _meshes(), _batch()
    plain = _net()
    model = roundpipe_fx.compile(vocabulary_parallel(copy.deepcopy(plain), mesh["tp"]), mesh=mesh, num_microbatches=2)
    model.trace(**batch)
    language_loss(model(batch["tokens"]), batch["labels"]).backward()
    expected = language_loss(plain(batch["tokens"]), batch["labels"])
    expected.backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(_whole(value.grad), plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        loss = language_loss(model(batch["tokens"]), batch["labels"])
    torch.testing.assert_close(loss, expected.detach())
    shorter = batch["tokens"][:4, :6]  # a batch of another shape
    model.zero_grad()
    plain.zero_grad()
    language_loss(model(shorter), shorter).backward()
    language_loss(plain(shorter), shorter).backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(_whole(value.grad), plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    before = {name: _whole(value.detach()).clone() for name, value in model.named_parameters()}
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/parallel")
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=f"{folder}/parallel")
    model.load_state_dict(state)
    assert all(torch.equal(_whole(value.detach()), before[name]) for name, value in model.named_parameters())
    whole = {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}
    dcp.load({"model": whole}, checkpoint_id=f"{folder}/parallel")
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in whole.items())
    model.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})  # whole on each rank
    assert all(torch.equal(_whole(v.detach()), plain.get_parameter(n) + 1) for n, v in model.named_parameters())
    with pytest.raises(NotImplementedError, match=r"dcp\.save"):
        model.save(f"{folder}/files")


def _raises_everywhere(rank: int, plain: nn.Module, parallel: Any, name: str, **options: Any) -> None:
    batch = _batch()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(name, "tp"))
    model = roundpipe_fx.compile(parallel(copy.deepcopy(plain), mesh["tp"]), mesh=mesh, num_microbatches=4, **options)
    model.trace(**batch)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model.forward_backward(**batch)
        return [_whole(value.grad).clone() for value in model.parameters()]

    gradients()  # sizes that depend on data are known to the plan from now on
    Armed.call = 100
    expected = gradients()
    count = 100 - Armed.call
    for broken, call in ((0, 0), (1, 1), (2, 3), (3, count // 2), (1, count - 2), (2, count - 1)):
        Armed.call = call if rank == broken else None
        start = time.monotonic()
        with pytest.raises((ValueError, RemoteError), match="the stage of this rank is broken") as caught:
            model.forward_backward(**batch)
        assert time.monotonic() - start < 10
        assert isinstance(caught.value, ValueError if rank == broken else RemoteError)
        assert rank == broken or f"rank {broken} of the pipeline" in str(caught.value)
        Armed.call = None
    assert all(map(torch.equal, gradients(), expected))


def check_failures(rank: int, _folder: str) -> None:
    """If a stage raises on one rank, between its collectives, all ranks raise, and the next step runs as if nothing
    had been."""
    torch.manual_seed(0)
    plain = BreakingNet()
    for parallel, name in ((vocabulary_parallel, "pp"), (tensor_parallel, "dp")):
        _raises_everywhere(rank, plain, parallel, name)


def check_failures_of_compiled_stages(rank: int, _folder: str) -> None:
    torch.manual_seed(0)
    plain = BreakingNet()
    _raises_everywhere(rank, plain, vocabulary_parallel, "pp", stage_compiler=as_it_is)


def check_failures_with_sizes_that_depend_on_data(rank: int, _folder: str) -> None:
    torch.manual_seed(0)
    plain = PickingNet()
    for compiler, name in (("eager", "pp"), (as_it_is, "dp")):
        _raises_everywhere(rank, plain, picking_parallel, name, stage_compiler=compiler)


def check_errors(rank: int, _folder: str) -> None:
    """All ranks of a replica are given the same batch; what is not supported is said before anything runs."""
    mesh, batch = _meshes(), _batch()
    model = roundpipe_fx.compile(tensor_parallel(_net(), mesh["tp"]), mesh=mesh, num_microbatches=2)
    model.trace(**batch)
    for _ in range(2):  # also once the plan is known
        model.forward_backward(**batch)
        with pytest.raises(RanksDifferError, match=r"differ in batch\. Rank 0 has"):
            model.forward_backward(**{**batch, "tokens": batch["tokens"][: 8 - 4 * mesh["tp"].get_local_rank()]})
    with pytest.raises(ValueError, match=r"no parameter of the model is a DTensor"):
        roundpipe_fx.compile(_net(), mesh=mesh, num_microbatches=2)
    with pytest.raises(ValueError, match=r"is a DTensor on"):
        roundpipe_fx.compile(tensor_parallel(_net(), mesh["tp"]), mesh=mesh["pp"], num_microbatches=2)
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(ValueError, match="DTensor on the meta device"):
        roundpipe_fx.compile(tensor_parallel(empty, mesh["tp"]), mesh=mesh, num_microbatches=2)
    sharing = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="shard='dp' is not supported"):
        roundpipe_fx.compile(tensor_parallel(_net(), sharing["tp"]), mesh=sharing, num_microbatches=2, shard="dp")


@pytest.mark.long
def test_pipelines_of_tensor_parallel_stages(tmp_path: Path) -> None:
    checks = [
        check_layouts,
        check_transformers,
        check_dropout_and_budget,
        check_replicas,
        check_calls_and_checkpoints,
        check_failures,
        check_failures_of_compiled_stages,
        check_errors,
    ]
    in_processes(4, checks, tmp_path)


@pytest.mark.long
def test_sizes_of_tensor_parallel_stages_that_depend_on_data(tmp_path: Path) -> None:
    checks = [check_sizes_that_depend_on_data, check_failures_with_sizes_that_depend_on_data]
    in_processes(4, checks, tmp_path)


@pytest.mark.long
def test_tensor_parallel_stages_that_inductor_compiles(tmp_path: Path) -> None:
    in_processes(4, [check_compiled_stages], tmp_path)


def check_replicas_of_pipelines(_rank: int, _folder: str) -> None:
    """All three dimensions: two steps are those of one process with the whole batch."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    tokens, plain = _batch()["tokens"], _net().double()
    own = tokens.chunk(2)[mesh["dp"].get_local_rank()]
    model = sequence_parallel(copy.deepcopy(plain), mesh["tp"])
    found = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=2, schedule="1f1b")
    found.trace(own, labels=own, loss_fn=language_loss)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, found)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        language_loss(plain(tokens), tokens).backward()
        found.forward_backward(own, labels=own, loss_fn=language_loss)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(found.clip_grad_norm_(1.0), expected, rtol=1e-6, atol=0)
        for name, value in found.named_parameters():
            torch.testing.assert_close(_whole(value.grad), plain.get_parameter(name).grad, rtol=1e-6, atol=1e-9)
        for optimizer in optimizers:
            optimizer.step()
    for name, value in found.named_parameters():
        torch.testing.assert_close(_whole(value.detach()), plain.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_replicas_of_pipelines_of_tensor_parallel_stages(tmp_path: Path) -> None:
    in_processes(8, [check_replicas_of_pipelines], tmp_path)
