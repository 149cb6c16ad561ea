"""RoundPipe's dispatch over processes: stages run on any rank, and each rank has the whole model."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import roundpipe_fx
from roundpipe_fx import Schedule
from tests.distributed.models import make
from tests.distributed.reference import train_on_rank_0
from tests.processes import in_processes


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))


def _steps(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [model.forward_backward(**batch) for _ in range(2)]


class Deep(nn.Module):
    """Layers without buffers, wide beside their batch: what is summed at the end of a step is a part of its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(torch.tanh(layer(x)), 0.1, self.training)
        return x


def check_dispatch(_rank: int, folder: str) -> None:
    """RoundPipe's dispatch: each rank has the whole model, and the bits of one process; also for sizes that a step
    shows, after which slots are divided otherwise."""
    for name, options in (("experts", {"memory_budget": 0.3}), ("tied", {"checkpoint": "except_last"}), ("llama", {})):
        options = {"num_microbatches": 4, "schedule": "roundpipe", **options}
        model, batch = make(name)
        plain = copy.deepcopy(model)
        alone = roundpipe_fx.compile(plain, devices=["cpu"] * dist.get_world_size(), **options)
        losses = train_on_rank_0(plain, functools.partial(_steps, alone, batch))
        after = torch.get_rng_state()
        compiled = roundpipe_fx.compile(model, mesh=_mesh(), **options)
        assert all(map(torch.equal, _steps(compiled, batch), losses)), (name, options)
        assert torch.equal(torch.get_rng_state(), after)
        expected, found = dict(plain.named_parameters()), dict(compiled.named_parameters())
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert (value.grad is None) == (expected[key].grad is None)
            assert value.grad is None or torch.equal(value.grad, expected[key].grad), key
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(compiled.clip_grad_norm_(0.1), norm, rtol=1e-5, atol=0)
    dcp.save({"model": compiled.state_dict()}, checkpoint_id=f"{folder}/dispatched")
    state = {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}
    dcp.load({"model": state}, checkpoint_id=f"{folder}/dispatched")
    assert all(torch.equal(state[name], value) for name, value in compiled.state_dict().items())
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "loss_fn")}
    with pytest.raises(RuntimeError, match="use forward_backward, which runs forward and backward in one step"):
        compiled(**inputs)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).logits, plain(**inputs).logits, rtol=1e-5, atol=1e-6)
    normed, batch = make("net")
    with pytest.raises(ValueError, match="With schedule='roundpipe' all ranks have them: use another schedule"):
        roundpipe_fx.compile(normed, mesh=_mesh(), num_microbatches=2, schedule="roundpipe").trace(**batch)


CROSSED = """
0: F0.0 F0.1 B1.0 B1.1
1: F1.0 F1.1 B0.0 B0.1
"""


def check_backwards_elsewhere(_rank: int, _folder: str) -> None:
    """A schedule that runs backwards on other ranks than their forwards: a step has the bits of one process, and a
    call is refused."""
    plain, batch = make("llama")
    crossed, straight = copy.deepcopy(plain), copy.deepcopy(plain)
    mesh = _mesh()
    model = roundpipe_fx.compile(crossed, mesh=mesh, num_microbatches=2, schedule=Schedule.parse(CROSSED))
    losses = train_on_rank_0(plain, lambda: _steps(roundpipe_fx.compile(plain, num_microbatches=2), batch))
    assert all(map(torch.equal, _steps(model, batch), losses))
    gradients = {name: value.grad for name, value in model.named_parameters()}
    assert all(torch.equal(value, plain.get_parameter(name).grad) for name, value in gradients.items())
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "loss_fn")}
    with pytest.raises(RuntimeError, match=r"runs B\d\.0 on a rank that has not seen"):
        model(**inputs)
    same = roundpipe_fx.compile(straight, mesh=mesh, num_microbatches=2, schedule="gpipe")
    same(**inputs).logits.square().mean().backward()


def check_budget_of_dispatch(_rank: int, _folder: str) -> None:
    """Each rank gets all gradients at the end, also those of stages that all ranks have added to."""
    x = torch.randn(64, 128)
    for microbatches, share in ((4, 1.0), (6, 0.0)):
        options = {"num_microbatches": microbatches, "memory_budget": share, "dynamic": False}
        compiled = roundpipe_fx.compile(Deep(), mesh=_mesh(), schedule="roundpipe", **options)
        compiled.trace(x, labels=x, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            compiled.zero_grad()
            with roundpipe_fx.measure_peak("cpu") as peak:
                compiled.forward_backward(x, labels=x, loss_fn=nn.functional.mse_loss)
            assert peak.bytes <= compiled.plan.budget, (microbatches, peak.bytes, compiled.plan.budget)


@pytest.mark.long
def test_dispatch(tmp_path: Path) -> None:
    in_processes(2, [check_dispatch, check_backwards_elsewhere], tmp_path)


@pytest.mark.long
def test_budget_of_dispatch(tmp_path: Path) -> None:
    in_processes(3, [check_budget_of_dispatch], tmp_path)
