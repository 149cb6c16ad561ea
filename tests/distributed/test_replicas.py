"""Replicas of a pipeline over processes: gradients are the mean of separate pipelines', and nothing else differs."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import roundpipe_fx
from roundpipe_fx.distributed.ranks import RanksDifferError, RemoteError
from roundpipe_fx.pipeline.step import scheduled
from roundpipe_fx.pipeline.step.scheduled import UnequalMicrobatches, UnequalMicrobatchesError
from roundpipe_fx.planner import cut_for_schedule
from roundpipe_fx.schedules import data_parallel
from tests.distributed.models import Net, make
from tests.distributed.reference import train_on_rank_0
from tests.processes import in_processes

STEPS = 2
Gradients = dict[str, torch.Tensor]
Run = Callable[[Any, dict[str, Any]], torch.Tensor]
"""Takes a model and a batch, runs a step, and returns its loss."""


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


def _batch_of(batch: dict[str, Any], replica: int, rows: int = 16) -> dict[str, Any]:
    """Other rows for each replica."""
    start = 8 * replica
    return {
        name: value[start : start + rows] if isinstance(value, torch.Tensor) else value for name, value in batch.items()
    }


def _step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return model.forward_backward(**batch)


def _call(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "loss_fn")}
    loss = batch["loss_fn"](model(**inputs), batch["labels"])
    loss.backward()
    return loss.detach()


def _gradients(model: nn.Module) -> Gradients:
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def _steps(model: Any, batch: dict[str, Any], seed: int, run: Run) -> list[tuple[torch.Tensor, Gradients]]:
    torch.manual_seed(seed)
    found = []
    for _ in range(STEPS):
        found.append((run(model, batch), _gradients(model)))
        model.zero_grad()
    return found


def _everywhere(value: Any) -> list[Any]:
    """A value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _mean(first: Gradients, second: Gradients) -> Gradients:
    assert first.keys() == second.keys()
    return {name: first[name] / 2 + second[name] / 2 for name in first}


def _check_equal(name: str, run: Run = _step, **options: Any) -> None:
    """Losses are bitwise those of separate pipelines, gradients their mean, buffers the first replica's."""
    mesh = _mesh()
    replica, stage = mesh.get_coordinate()
    model, batch = make(name)
    own, alone = _batch_of(batch, replica), None
    if stage == 0:
        plain = copy.deepcopy(model)
        separate = roundpipe_fx.compile(plain, devices=["cpu"] * 2, **options)
        alone = _steps(separate, own, 5 + replica, run), dict(plain.named_buffers()), torch.get_rng_state()
    first, _, second, _ = _everywhere(alone)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(replica)  # the first replica's are shared
    compiled = roundpipe_fx.compile(model, mesh=mesh, **options)
    found = _steps(compiled, own, 5 + replica, run)
    for (loss, gradients), one, two in zip(found, first[0], second[0], strict=True):
        assert torch.equal(loss, (one, two)[replica][0])
        expected = _mean(one[1], two[1])
        assert gradients and all(torch.equal(value, expected[key]) for key, value in gradients.items())
    assert set().union(*_everywhere(set(found[0][1]))) == first[0][0][1].keys()
    assert all(torch.equal(value, first[1][key]) for key, value in compiled.named_buffers())
    assert torch.equal(torch.get_rng_state(), (first, second)[replica][2])


def check_gradients(_rank: int, _folder: str) -> None:
    _check_equal("net", num_microbatches=4)
    _check_equal("tied", num_microbatches=1)
    _check_equal("tied", _call, num_microbatches=2)
    _check_equal("tied", num_microbatches=4, schedule="roundpipe")
    data_parallel.TOGETHER_BYTES = 256  # so that gradients are reduced in place too
    _check_equal("net", num_microbatches=4, schedule="interleaved")


def check_one_seed(_rank: int, _folder: str) -> None:
    """Replicas with the same seed draw as further microbatches of one pipeline, and stay alike."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    replica = mesh["dp"].get_local_rank()
    model, batch = make("tied")
    plain = copy.deepcopy(model)
    whole = roundpipe_fx.compile(plain, devices=["cpu"] * 2, num_microbatches=4)
    expected = train_on_rank_0(plain, lambda: _steps(whole, _batch_of(batch, 0, 24), 5, _step))
    after = torch.get_rng_state()
    compiled = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=2)
    own = {name: value[12 * replica :][:12] if name != "loss_fn" else value for name, value in batch.items()}
    for (loss, gradients), (of_whole, all_gradients) in zip(_steps(compiled, own, 5, _step), expected, strict=True):
        losses = torch.stack(_everywhere(loss))
        torch.testing.assert_close(losses.mean(), of_whole, rtol=1e-6, atol=0)
        assert losses[0] != losses[1]
        for name, value in gradients.items():
            torch.testing.assert_close(value, all_gradients[name], rtol=1e-5, atol=1e-7)
    assert torch.equal(torch.get_rng_state(), after)


def check_no_sync(_rank: int, _folder: str) -> None:
    """Gradients that were added without averaging are averaged by the next step, whichever way it runs."""
    mesh = _mesh()
    replica, _ = mesh.get_coordinate()
    model, batch = make("tied")
    own = _batch_of(batch, replica)
    compiled = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=2)
    compiled.trace(**own)
    for run in (_step, _call):
        separate = []
        for count in (1, 2):
            compiled.zero_grad()
            torch.manual_seed(3 + replica)
            with compiled.no_sync():
                for _ in range(count):
                    run(compiled, own)
            separate.append(_everywhere(_gradients(compiled)))
        both = [_mean(separate[1][stage], separate[1][2 + stage]) for stage in range(2)]
        compiled.zero_grad()
        torch.manual_seed(3 + replica)
        with compiled.no_sync():
            run(compiled, own)
        assert all(torch.equal(value, separate[0][dist.get_rank()][key]) for key, value in _gradients(compiled).items())
        run(compiled, own)
        stage = mesh.get_coordinate()[1]
        assert all(torch.equal(value, both[stage][key]) for key, value in _gradients(compiled).items())
        assert not torch.equal(separate[0][0]["embed.weight"], separate[0][2]["embed.weight"])
    with pytest.raises(RanksDifferError, match=r"differ in no_sync\(\)"), _no_sync_on_one(compiled, replica):
        _step(compiled, own)


def _no_sync_on_one(model: Any, replica: int) -> contextlib.AbstractContextManager[None]:
    return model.no_sync() if replica else contextlib.nullcontext()


class Counted:
    """Calls of stages in this process, and the number of the one that raises."""

    calls = 0
    broken: int | None = None


def _counting(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        Counted.calls += 1
        if Counted.calls == Counted.broken:
            raise ValueError("the stage of this rank is broken")
        return module(*arguments)

    return call


def check_failures(rank: int, _folder: str) -> None:
    """An exception on one rank is raised on all of both replicas, also when some gradients are being averaged already;
    the next step runs as if nothing had been."""
    mesh = _mesh()
    replica, _ = mesh.get_coordinate()
    model, batch = make("tied")
    own = _batch_of(batch, replica)
    options = {"num_microbatches": 4, "schedule": "interleaved", "stage_compiler": _counting}
    compiled = roundpipe_fx.compile(model, mesh=mesh, **options)
    compiled.trace(**own)
    Counted.calls = 0
    expected = _steps(compiled, own, 5, _step)
    calls = Counted.calls // STEPS
    for broken, call in ((0, 1), (3, calls - 1), (0, calls)):
        Counted.calls, Counted.broken = 0, call if rank == broken else None
        start = time.monotonic()
        with pytest.raises(Exception, match="the stage of this rank is broken") as caught:
            compiled.forward_backward(**own)
        assert time.monotonic() - start < 10
        assert isinstance(caught.value, ValueError if rank == broken else RemoteError)
        assert rank == broken or f"rank {broken} of the pipelines raised ValueError" in str(caught.value)
    Counted.broken = None
    assert all(value.grad is None for value in compiled.parameters())
    for (loss, gradients), (known, all_known) in zip(_steps(compiled, own, 5, _step), expected, strict=True):
        assert torch.equal(loss, known) and all(torch.equal(value, all_known[key]) for key, value in gradients.items())


def check_differences(_rank: int, _folder: str) -> None:
    """Options are those of all ranks, batches those of a pipeline; their shapes may differ after the first one."""
    mesh = _mesh()
    replica, stage = mesh.get_coordinate()
    model, batch = make("net")
    compiled = roundpipe_fx.compile(copy.deepcopy(model), mesh=mesh, num_microbatches=2 + 2 * replica)
    with pytest.raises(RanksDifferError, match=r"the pipelines differ in options(.|\n)*microbatches=4"):
        compiled.forward_backward(**batch)
    compiled = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=2)
    with pytest.raises(RanksDifferError, match=r"the shapes of the first batch(.|\n)*must have the same shapes"):
        compiled.forward_backward(**_batch_of(batch, 0, 24 - 8 * replica))
    with pytest.raises(RanksDifferError, match=r"differ in batch. Rank 0 has(.|\n)*rank 1"):
        compiled.trace(**{**batch, "flag": stage * (1 - replica)})
    compiled.trace(**batch)
    compiled.eval()
    with torch.no_grad():
        for _ in range(1 + replica):  # replicas evaluate as many batches as they have
            compiled(batch["x"])
    own = _batch_of(batch, 0, 16 + 8 * replica)
    compiled.forward_backward(**own)
    found, before = _gradients(compiled), None
    for value in compiled.parameters():
        value.grad = None
    with compiled.no_sync():
        compiled.forward_backward(**own)
    before = _everywhere(_gradients(compiled))
    expected = _mean(before[stage], before[2 + stage])
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


def check_replicas_beside_each_other(_rank: int, _folder: str) -> None:
    """The ranks of a pipeline need not follow each other: batches are compared within pipelines all the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    replica = mesh["dp"].get_local_rank()
    model, batch = make("tied")
    compiled = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=2)
    compiled.trace(**_batch_of(batch, 0))
    torch.manual_seed(replica)
    for rows in (16, 16 + 8 * replica, 16 + 8 * replica):
        loss = compiled.forward_backward(**_batch_of(batch, 0, rows))
        losses = _everywhere(loss)
        assert losses[0] == losses[2] != losses[1] == losses[3]


def check_another_plan(_rank: int, _folder: str) -> None:
    """If the microbatches of one replica do not fit together, all replicas plan with less, and run the step again."""
    replica, _ = _mesh().get_coordinate()
    model, batch = make("net")
    compiled = roundpipe_fx.compile(model, mesh=_mesh(), num_microbatches=2, memory_budget="1GiB", dynamic=False)
    compiled.trace(**batch)
    refusing = [True] if replica else []

    def check_together(*_arguments: Any) -> None:
        if refusing:
            refusing.clear()
            raise UnequalMicrobatchesError(UnequalMicrobatches(200, 100, False))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduled, "check_memory_together", check_together)
        compiled.forward_backward(**_batch_of(batch, replica))
    assert not refusing
    shares = _everywhere(compiled._state_of_roundpipe_fx.learned.share)
    assert len(set(shares)) == 1 and shares[0] < 0.5
    assert all(value.grad is not None for value in compiled.parameters())


def check_norm_and_checkpoint(_rank: int, folder: str) -> None:
    """The norm is that of the mean gradients; a checkpoint has each tensor once, and all replicas load it."""
    mesh = _mesh()
    replica, _ = mesh.get_coordinate()
    model, batch = make("net")
    compiled = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=2)
    compiled.forward_backward(**_batch_of(batch, replica))
    plain = make("net")[0]
    gradients = {name: value for own in _everywhere(_gradients(compiled)) for name, value in own.items()}
    for name, value in plain.named_parameters():
        value.grad = gradients[name]
    norm = compiled.clip_grad_norm_(0.01)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
    assert all(torch.equal(value.grad, plain.get_parameter(name).grad) for name, value in compiled.named_parameters())
    torch.optim.AdamW(compiled.parameters()).step()
    torch.optim.AdamW(plain.parameters()).step()
    dcp.save({"model": compiled.state_dict()}, checkpoint_id=f"{folder}/replicas")
    size = sum(file.stat().st_size for file in Path(f"{folder}/replicas").glob("*.distcp"))
    metadata = dcp.FileSystemReader(f"{folder}/replicas").read_metadata()
    assert metadata.storage_data is not None
    assert size == sum(written.length for written in metadata.storage_data.values())  # nothing was written twice
    state = plain.state_dict()
    expected = copy.deepcopy(dict(plain.named_parameters()))
    dcp.load({"model": state}, checkpoint_id=f"{folder}/replicas")
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def check_budget(_rank: int, _folder: str) -> None:
    """What a rank allocates in a step, what is copied for averaging included, is within the budget."""
    mesh = _mesh()
    # Beside the second model, the generator's states are large.
    small = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4))
    models = (Net(width=128), torch.randn(512, 128)), (small, torch.randn(8, 4))
    for (net, x), microbatches in itertools.product(models, (1, 4)):
        options = {"memory_budget": 0.0, "tiling": "never", "dynamic": False}
        compiled = roundpipe_fx.compile(copy.deepcopy(net), mesh=mesh, num_microbatches=microbatches, **options)
        compiled.trace(x, labels=x, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            compiled.zero_grad()
            with roundpipe_fx.measure_peak("cpu") as peak:
                compiled.forward_backward(x, labels=x, loss_fn=nn.functional.mse_loss)
            assert peak.bytes <= compiled.plan.budget, (microbatches, peak.bytes, compiled.plan.budget)


def check_data_parallel_alone(rank: int, _folder: str) -> None:
    """A mesh of replicas only: each rank has the whole model; of a model without memory all have the same values."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = make("net")[0]
    batch = make("net")[1]
    compiled = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=2)
    own = {name: value[6 * rank :][:6] if name != "loss_fn" else value for name, value in batch.items()}
    compiled.trace(**own)
    assert len(compiled.plan.stages) == 1  # its gradients are small
    torch.manual_seed(rank)
    compiled.init_weights(lambda name, value: value.copy_(torch.rand(value.shape) / 10 + rank))
    states = _everywhere(compiled.state_dict())
    assert states[0].keys() == make("net")[0].state_dict().keys()
    assert all(torch.equal(value, states[0][name]) for state in states for name, value in state.items())
    with compiled.no_sync():
        torch.manual_seed(rank)
        compiled.forward_backward(**own)
    separate = _everywhere(_gradients(compiled))
    compiled.zero_grad()
    torch.manual_seed(rank)
    compiled.forward_backward(**own)
    for name, value in _gradients(compiled).items():
        expected = torch.stack([each[name] for each in separate]).mean(0)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def check_averaging_by_stages(rank: int, _folder: str) -> None:
    """Replicas of one device have several stages: gradients are the mean of separate ones', of other batches too."""
    cut_for_schedule._AVERAGED_BYTES = cut_for_schedule._GATHERED_BYTES = 1
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    for shard, microbatches in ((None, 2), ("dp", 1)):
        model, batch = make("net")
        alone = roundpipe_fx.compile(copy.deepcopy(model), num_microbatches=microbatches)
        compiled = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=microbatches, shard=shard)
        for rows in (6, 4):  # the second is cut as the first was
            own = {name: value[6 * rank :][:rows] if name != "loss_fn" else value for name, value in batch.items()}
            torch.manual_seed(rank)
            alone.zero_grad()
            alone.forward_backward(**own)
            torch.manual_seed(rank)
            compiled.trace(**own)
            compiled.zero_grad()
            compiled.forward_backward(**own)
            assert len(compiled.plan.stages) > 1
            separate = _everywhere(_gradients(alone))
            for name, parameter in compiled.named_parameters():
                value = parameter.grad.full_tensor() if shard else parameter.grad
                expected = torch.stack([each[name] for each in separate]).mean(0)
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_replicas(tmp_path: Path) -> None:
    checks = [
        check_gradients,
        check_one_seed,
        check_no_sync,
        check_failures,
        check_differences,
        check_replicas_beside_each_other,
        check_another_plan,
        check_norm_and_checkpoint,
        check_budget,
        check_data_parallel_alone,
        check_averaging_by_stages,
    ]
    in_processes(4, checks, tmp_path)
