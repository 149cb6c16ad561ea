"""Sharded parameters: steps are bitwise equal to those with whole parameters on each replica, in less memory."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import roundpipe_fx
from roundpipe_fx.distributed import gathering
from roundpipe_fx.distributed.ranks import RemoteError
from roundpipe_fx.schedules import data_parallel
from tests.distributed.models import Block, make
from tests.processes import in_processes

STEPS = 3


def _meshes() -> dict[str, DeviceMesh]:
    """Two pipelines of two ranks; twice two replicas of one."""
    return {
        "dp, pp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")),
        "dp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "dp"))["dp"],
    }


def _own(batch: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Other rows for each replica."""
    start = 8 * mesh.get_local_rank("dp")
    return {
        name: value[start : start + 16] if isinstance(value, torch.Tensor) else value for name, value in batch.items()
    }


def _call(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "loss_fn")}
    loss = batch["loss_fn"](model(**inputs), batch["labels"])
    loss.backward()
    return loss.detach()


def _step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return model.forward_backward(**batch)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _train(model: Any, batch: dict[str, Any], run: Any, mesh: DeviceMesh) -> list[Any]:
    """Losses, gradients and weights of some steps."""
    model.trace(**batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(5 + mesh.get_local_rank("dp"))
    found = []
    for _ in range(STEPS):
        with roundpipe_fx.measure_peak("cpu") as peak:
            loss = run(model, batch)
        assert model.plan.budget is None or peak.bytes <= model.plan.budget
        gradients = {n: _whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss, gradients, {n: _whole(p.detach()).clone() for n, p in model.named_parameters()}))
    found.append(({n: b.clone() for n, b in model.named_buffers()}, torch.get_rng_state()))
    return found


def _check_equal(name: str, mesh: DeviceMesh, run: Any = _step, frozen: tuple[str, ...] = (), **options: Any) -> None:
    model, batch = _made(name)
    for each in frozen:
        model.get_parameter(each).requires_grad_(False)
    own = _own(batch, mesh)
    whole = roundpipe_fx.compile(copy.deepcopy(model), mesh=mesh, **options)
    sharded = roundpipe_fx.compile(model, mesh=mesh, shard="dp", **options)
    expected, found = _train(whole, own, run, mesh), _train(sharded, own, run, mesh)
    for (loss, gradients, weights), (other, of_whole, weights_of_whole) in zip(found[:-1], expected[:-1], strict=True):
        assert torch.equal(loss, other)
        assert gradients and gradients.keys() == of_whole.keys()
        assert all(torch.equal(value, of_whole[key]) for key, value in gradients.items())
        assert all(torch.equal(value, weights_of_whole[key]) for key, value in weights.items())
    assert all(torch.equal(value, expected[-1][0][key]) for key, value in found[-1][0].items())
    assert torch.equal(found[-1][1], expected[-1][1])
    assert all(isinstance(value, DTensor) for value in sharded.parameters())
    for sharded_parameter in sharded._state_of_roundpipe_fx.processes().ownership.shards.by_traced.values():
        assert sharded_parameter.traced.untyped_storage().nbytes() == 0  # nothing stays gathered


def check_bits(_rank: int, _folder: str) -> None:
    meshes = _meshes()
    one, two = meshes["dp"], meshes["dp, pp"]
    _check_equal("net", one, num_microbatches=2, stages=4)
    _check_equal("tied", two, num_microbatches=2)
    _check_equal("tied", two, num_microbatches=4, schedule="roundpipe")
    _check_equal("tied", one, _call, num_microbatches=1, stages=3)
    _check_equal("net", two, _call, num_microbatches=2, stages=6, frozen=("head.weight", "layers.0.up.bias"))
    data_parallel.SMALL_BYTES = gathering.SMALL_BYTES = 256  # so that parameters are gathered and reduced in place too
    budget = {"memory_budget": 0.5, "tiling": "never", "dynamic": False}
    _check_equal("net", two, num_microbatches=4, schedule="interleaved", **budget)


def check_memory_and_checkpoint(rank: int, folder: str) -> None:
    """At rest a rank has half of everything; the norm is that of whole gradients; a checkpoint has each row once, and
    is loaded by sharded models and others."""
    mesh = _meshes()["dp, pp"]
    batch = _own(make("net")[1], mesh)
    whole, compiled = (
        roundpipe_fx.compile(make("net")[0], mesh=mesh, num_microbatches=2, shard=shard) for shard in (None, "dp")
    )
    norms, sizes = [], []
    for model in (whole, compiled):
        model.trace(**batch)
        optimizer = torch.optim.AdamW(model.parameters())
        torch.manual_seed(3)
        model.forward_backward(**batch)
        norms.append(model.clip_grad_norm_(0.01))
        optimizer.step()
        states = [value for own in optimizer.state.values() for value in own.values() if value.dim()]
        gradients = [value.grad for value in model.parameters()]
        sizes.append(sum(_local(value).nbytes for value in (*model.parameters(), *gradients, *states)))
    assert sizes[1] == sizes[0] / 2
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(compiled, optimizer, options=options)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/sharded")
    size = sum(file.stat().st_size for file in Path(f"{folder}/sharded").glob("*.distcp"))
    metadata = dcp.FileSystemReader(f"{folder}/sharded").read_metadata()
    assert metadata.storage_data is not None
    assert size == sum(written.length for written in metadata.storage_data.values())  # nothing was written twice
    expected = {name: _whole(value.detach()).clone() for name, value in compiled.named_parameters()}
    with torch.no_grad():
        for value in compiled.parameters():
            _local(value).zero_()
    before = {name: _whole(value).clone() for name, value in optimizer_state.items() if isinstance(value, torch.Tensor)}
    for value in optimizer_state.values():
        if isinstance(value, torch.Tensor):
            _local(value).zero_()
    state = {"model": compiled.state_dict(), "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=f"{folder}/sharded")
    set_state_dict(
        compiled, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    assert all(torch.equal(_whole(value), expected[name]) for name, value in compiled.named_parameters())
    loaded = get_state_dict(compiled, optimizer, options=options)[1]
    assert before and all(torch.equal(_whole(loaded[name]), value) for name, value in before.items())
    plain = make("net")[0].state_dict()
    dcp.load({"model": plain}, checkpoint_id=f"{folder}/sharded")  # in one process
    assert all(torch.equal(plain[name], value) for name, value in expected.items())
    compiled.load_state_dict(make("net")[0].state_dict())  # whole tensors
    fresh = make("net")[0]
    assert all(torch.equal(_whole(value), fresh.get_parameter(name)) for name, value in compiled.named_parameters())


def check_without_memory(_rank: int, _folder: str) -> None:
    """A model without memory is initialized as in one process, and evaluated."""
    mesh = _meshes()["dp"]
    batch = _own(make("net")[1], mesh)
    with torch.device("meta"):
        model = make("net")[0]
    compiled = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=1, stages=3, shard="dp")
    compiled.trace(**batch)
    compiled.init_weights(lambda name, value: value.copy_(torch.rand(value.shape)) if value.dim() else value.zero_())
    alone = roundpipe_fx.compile(make("net")[0], mesh=mesh, num_microbatches=1, stages=3)
    alone.trace(**batch)
    alone.init_weights(lambda name, value: value.copy_(torch.rand(value.shape)) if value.dim() else value.zero_())
    compiled.eval(), alone.eval()
    with torch.no_grad():
        assert torch.equal(compiled(batch["x"]), alone(batch["x"]))


def check_refused(_rank: int, _folder: str) -> None:
    """What does not go together is an error; a parameter that changes before the backward too."""
    mesh = _meshes()["dp"]
    model, batch = make("tied")
    with pytest.raises(ValueError, match="valid values are 'dp'"):
        roundpipe_fx.compile(model, mesh=mesh, shard="pp")
    with pytest.raises(ValueError, match="there is no dimension 'dp'"):
        roundpipe_fx.compile(model, shard="dp")
    transposed = nn.Module()
    transposed.scale = nn.Parameter(torch.ones(2, 3).t())
    with pytest.raises(ValueError, match="not contiguous"):
        roundpipe_fx.compile(transposed, mesh=mesh, shard="dp")
    hooked = nn.Linear(2, 2)
    hooked.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match="has hooks, which the DTensor"):
        roundpipe_fx.compile(hooked, mesh=mesh, shard="dp")
    returning = roundpipe_fx.compile(_ReturnsWeight(), mesh=mesh, shard="dp", num_microbatches=1)
    with pytest.raises(ValueError, match="the step returns the parameter 'weight' or a view of it"):
        returning.trace(torch.ones(4, 3))
    own = _own(batch, mesh)
    compiled = roundpipe_fx.compile(model, mesh=mesh, shard="dp", num_microbatches=2, stages=3)
    compiled.trace(**own)
    bounded = roundpipe_fx.compile(make("net")[0], mesh=mesh, shard="dp", num_microbatches=2, memory_budget=1.0)
    with pytest.raises(RuntimeError, match=r"no_sync\(\) with shard='dp' holds the whole gradients"), bounded.no_sync():
        pass
    loss = own["loss_fn"](compiled(own["tokens"]), own["labels"])
    with torch.no_grad():
        compiled.get_parameter("embed.weight").mul_(2)
    with pytest.raises(RuntimeError, match="changed in place after the forward"):
        loss.backward()


class _ReturnsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ self.weight, self.weight.t()


def check_failures(rank: int, _folder: str) -> None:
    """An exception on one rank is raised on all, and the next step runs as if nothing had been."""
    mesh = _meshes()["dp, pp"]
    model, batch = make("tied")
    own = _own(batch, mesh)
    options = {"num_microbatches": 2, "schedule": "interleaved", "stage_compiler": _breaking}
    compiled = roundpipe_fx.compile(model, mesh=mesh, shard="dp", **options)
    compiled.trace(**own)
    torch.manual_seed(5)
    expected = compiled.forward_backward(**own)
    gradients = {name: _whole(value.grad).clone() for name, value in compiled.named_parameters()}
    compiled.zero_grad()
    for broken, call in ((0, 1), (3, 3)):
        _Broken.calls = call if rank == broken else None
        with pytest.raises((ValueError, RemoteError), match="the stage of this rank is broken"):
            compiled.forward_backward(**own)
        assert all(value.grad is None for value in compiled.parameters())
    _Broken.calls = None
    torch.manual_seed(5)
    assert torch.equal(compiled.forward_backward(**own), expected)
    assert all(torch.equal(_whole(value.grad), gradients[name]) for name, value in compiled.named_parameters())


class _Broken:
    """In so many calls of stages one raises; ``None``: none does."""

    calls: int | None = None


def _breaking(module: torch.fx.GraphModule, _inputs: Any) -> Any:
    def call(*arguments: Any) -> Any:
        if _Broken.calls is not None:
            _Broken.calls -= 1
            if not _Broken.calls:
                raise ValueError("the stage of this rank is broken")
        return module(*arguments)

    return call


class Odd(nn.Module):
    """Parameters that are single numbers, of one rank and of all, and one with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(16) for _ in range(4))
        self.scale, self.last = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.tensor(1.1))
        self.shift = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale + self.shift
        return x * self.last


def _made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model, batch = make("net" if name == "odd" else name)
    return (Odd(), batch) if name == "odd" else (model, batch)


def _accumulated(model: Any, batch: dict[str, Any], run: Any) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Losses and gradients of steps that accumulate in several ways."""
    torch.manual_seed(3)
    found = []
    for unsynchronized in ((0, 1), (1,), ()):
        for place in range(3):
            with model.no_sync() if place in unsynchronized else contextlib.nullcontext():
                loss = run(model, batch)
        found.append((loss, {n: _whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}))
        model.zero_grad(set_to_none=len(unsynchronized) != 1)
    return found


def check_accumulation(_rank: int, folder: str) -> None:
    """Gradients of several steps, with and without averaging each, are bitwise equal to those without shards. A
    parameter that is a single number is whole on each replica, and counts once in norms and checkpoints."""
    meshes = _meshes()
    _check_equal("odd", meshes["dp"], num_microbatches=2, stages=3, memory_budget=0.5, frozen=("scale",))
    mesh, (model, batch) = meshes["dp, pp"], _made("odd")
    plain, own = copy.deepcopy(model), _own(batch, mesh)
    whole = roundpipe_fx.compile(copy.deepcopy(model), mesh=mesh, num_microbatches=2)
    sharded = roundpipe_fx.compile(copy.deepcopy(model), mesh=mesh, num_microbatches=2, shard="dp")
    whole.trace(**own), sharded.trace(**own)
    for run in (_step, _call):
        steps = zip(_accumulated(sharded, own, run), _accumulated(whole, own, run), strict=True)
        for (loss, gradients), (other, expected) in steps:
            assert torch.equal(loss, other)
            assert gradients and gradients.keys() == expected.keys()
            assert all(torch.equal(value, expected[key]) for key, value in gradients.items())
    with sharded.no_sync():
        sharded.forward_backward(**own)
    with pytest.raises(RuntimeError, match="are not averaged yet"):
        sharded.clip_grad_norm_(1.0)
    norms = []
    for compiled in (whole, sharded):
        compiled.zero_grad()
        compiled.forward_backward(**own)
        norms.append(compiled.clip_grad_norm_(0.01))
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)
    torch.optim.SGD(sharded.parameters(), lr=0.1, foreach=True).step()
    dcp.save({"model": sharded.state_dict()}, checkpoint_id=f"{folder}/odd")
    state = plain.state_dict()
    dcp.load({"model": state}, checkpoint_id=f"{folder}/odd")
    changed = {name: _whole(value.detach()).clone() for name, value in sharded.named_parameters()}
    assert all(torch.equal(state[name], value) for name, value in changed.items())
    sharded.load_state_dict(model.state_dict())
    assert not any(torch.equal(changed[name], model.get_parameter(name)) for name in changed)
    assert all(torch.equal(_whole(v.detach()), model.get_parameter(name)) for name, v in sharded.named_parameters())


@pytest.mark.long
def test_sharding(tmp_path: Path) -> None:
    checks = [
        check_bits,
        check_accumulation,
        check_memory_and_checkpoint,
        check_without_memory,
        check_refused,
        check_failures,
    ]
    in_processes(4, checks, tmp_path)
