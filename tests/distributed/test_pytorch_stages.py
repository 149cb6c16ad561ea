"""A plan's stages run under the schedules of torch.distributed.pipelining."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import roundpipe_fx
from roundpipe_fx.schedules import interleaved
from tests.distributed.models import Block, Net, Skips, Tied, make
from tests.processes import Check, in_processes

MSE = nn.functional.mse_loss


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))


def _compiled(model: nn.Module, microbatches: int = 4, **options: Any) -> Any:
    return roundpipe_fx.compile(copy.deepcopy(model), mesh=_mesh(), num_microbatches=microbatches, **options)


def _step(schedule: Any, args: Sequence[Any], target: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    """A step of PyTorch's; the losses on the last rank."""
    losses: list[torch.Tensor] = []
    first = dist.get_rank() == 0
    schedule.step(*(args if first else ()), target=target, losses=losses, **kwargs)
    return losses


def _check_equal(stages: Sequence[Any], expected: Any) -> None:
    """Names, gradients and buffers of this rank's stages are those of the pipeline, bit for bit."""
    own = {name: value for stage in stages for name, value in stage.submod.named_parameters()}
    both = dict(expected.named_parameters())
    assert own.keys() == both.keys()
    for name, value in own.items():
        assert torch.equal(value.grad, both[name].grad), name
    buffers = dict(expected.named_buffers())
    for name, value in ((name, value) for stage in stages for name, value in stage.submod.named_buffers()):
        assert name not in buffers or torch.equal(value, buffers[name]), name


def check_schedules(rank: int, folder: str) -> None:
    """Losses, gradients and running statistics are those of our own runtime; the state dict is the model's."""
    torch.manual_seed(0)
    net, x, y = Net(dropout=0.0), torch.randn(24, 16), torch.randn(24, 16)
    for name, schedule_of in (
        ("1f1b", lambda own: Schedule1F1B(own[0], 4, MSE)),
        ("interleaved", lambda own: _from_csv(own, f"{folder}/{rank}.csv")),
    ):
        ours, exported = _compiled(net, schedule=name), _compiled(net, schedule=name)
        loss = ours.forward_backward(x, labels=y, loss_fn=MSE)
        stages = exported.pytorch_stages(x)
        losses = _step(schedule_of(stages), [x], y)
        assert not losses or torch.equal(torch.stack(losses).mul(0.25).sum(), loss)
        _check_equal(stages, ours)
        own = {name: value for stage in stages for name, value in stage.submod.state_dict().items()}
        assert own.keys() == exported.state_dict().keys()
        assert {id(v) for stage in stages for v in stage.submod.parameters()} == set(map(id, exported.parameters()))


def _from_csv(stages: list[Any], path: str) -> _PipelineScheduleRuntime:
    """PyTorch's runtime for schedules from files."""
    interleaved(2, 4, 4).to_csv(path)
    schedule = _PipelineScheduleRuntime(stages, 4, MSE)
    schedule._load_csv(path)
    return schedule


def check_language_model(_rank: int, _folder: str) -> None:
    """Four stages, each of which computes rotary embeddings itself; the last one returns the loss."""
    model, batch = make("llama")
    ours = _compiled(model, 2, schedule="interleaved", dynamic=False)
    loss = ours.forward_backward(**batch)
    exported = _compiled(model, 2, schedule="interleaved", dynamic=False)
    stages = exported.pytorch_stages(**batch)
    schedule = ScheduleInterleaved1F1B(stages, 2, lambda loss, _: loss)
    losses = _step(schedule, [], batch["labels"], **batch)
    assert not losses or torch.equal(torch.stack(losses).mul(0.5).sum(), loss)
    _check_equal(stages, ours)


class Stopped(nn.Module):
    """A gradient is stopped in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x.detach() + layer(x)
        return x


def check_refusals(_rank: int, _folder: str) -> None:
    """What PyTorch's runtime cannot do is refused on every rank, with names."""
    x, tokens = torch.randn(24, 16), torch.randint(32, (24, 6))
    for model, batch, text in (
        (Skips(), x, r"goes from stage 0 to stage [23](.|\n)*begin them elsewhere"),
        (Tied(), tokens, r"'embed\.weight' is read by stages \[0, 3\]"),
        (Stopped(), x, r"the gradient of detach in `.*x\.detach\(\)"),
    ):
        with pytest.raises(ValueError, match=text):
            _compiled(model, stages=4, schedule="interleaved").pytorch_stages(batch)
    compiled = _compiled(Net(dropout=0.0))
    with pytest.raises(ValueError, match="divisible by num_microbatches"):
        compiled.pytorch_stages(torch.randn(22, 16))
    (stage,) = compiled.pytorch_stages(x)
    stage.submod.eval()
    with pytest.raises(RuntimeError, match="exported in training mode"):
        stage.submod(x[:6])
    with torch.device("meta"):
        model = Net()
    with pytest.raises(RuntimeError, match=r"model\.load\(folder\)"):
        _compiled(model).pytorch_stages(x)


def check_one_rank(_rank: int, _folder: str) -> None:
    """A single rank has the whole model; without a gradient the stage is that of an evaluation."""
    torch.manual_seed(0)
    net, x, y = Net(dropout=0.0), torch.randn(24, 16), torch.randn(24, 16)
    ours, exported = _compiled(net), _compiled(net)
    ours.forward_backward(x, labels=y, loss_fn=MSE)
    stages = exported.pytorch_stages(x)
    _step(ScheduleGPipe(stages[0], 4, MSE), [x], y)
    _check_equal(stages, ours)
    exported.eval()
    (stage,) = exported.pytorch_stages(x)
    assert torch.equal(ScheduleGPipe(stage, 4).eval(x), ours.eval()(x))


QUICK: list[Check] = [check_schedules, check_refusals]


@pytest.mark.long
def test_two_processes(tmp_path: Path) -> None:
    in_processes(2, QUICK, tmp_path)


@pytest.mark.long
def test_a_language_model(tmp_path: Path) -> None:
    in_processes(2, [check_language_model], tmp_path)


@pytest.mark.long
def test_one_process(tmp_path: Path) -> None:
    in_processes(1, [check_one_rank], tmp_path)


def test_without_a_mesh() -> None:
    with pytest.raises(RuntimeError, match="without mesh="):
        roundpipe_fx.compile(Net(), num_microbatches=2).pytorch_stages(torch.randn(8, 16))
