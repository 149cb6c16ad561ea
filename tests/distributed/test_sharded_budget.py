"""Sharded parameters with a budget: peaks are within it, and what it has room for stays gathered."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import roundpipe_fx
from roundpipe_fx.budget import bytes_text
from tests.distributed.models import Net
from tests.processes import in_processes

SEVERAL_STAGES = {"num_microbatches": 4, "stages": 4, "schedule": "interleaved"}


def _step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return model.forward_backward(**batch)


def _call(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    loss = batch["loss_fn"](model(batch["x"]), batch["labels"])
    loss.backward()
    return loss.detach()


def _train(model: Any, batch: dict[str, Any], run: Any) -> list[Any]:
    """Loss, gradients and peak of two steps, the second of which adds to the gradients of the first."""
    torch.manual_seed(5)
    found = []
    for _ in range(2):
        with roundpipe_fx.measure_peak("cpu") as peak:
            loss = run(model, batch)
        gradients = {name: value.grad for name, value in model.named_parameters()}
        whole = {n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in gradients.items()}
        found.append((loss, whole, peak.bytes))
    return found


def check_within_budget(_rank: int, _folder: str) -> None:
    """The measured peak is within the budget; losses and gradients have the bits of whole parameters; a larger budget
    gathers less."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = torch.randn(192, 129)[mesh.get_local_rank() * 96 :][:96]
    net, batch = Net(width=129, depth=4), {"x": x, "labels": x, "loss_fn": nn.functional.mse_loss}

    def trained(run: Any = _step, budget: float | None = None, **options: Any) -> tuple[Any, list[Any]]:
        if budget is not None:
            options |= {"shard": "dp", "memory_budget": budget, "tiling": "never", "dynamic": False}
        model = roundpipe_fx.compile(copy.deepcopy(net), mesh=mesh, **options)
        if run is _step:
            model.trace(**batch)
        else:
            model.trace(batch["x"])
        found = _train(model, batch, run)
        plan = model.plan
        assert budget is None or max(peak for _, _, peak in found) <= plan.budget, (options, found, plan.budget)
        return plan, found

    _, expected = trained(**SEVERAL_STAGES)
    gathered = []
    for budget in (1.0, 0.2):
        plan, found = trained(budget=budget, **SEVERAL_STAGES)
        for (loss, gradients, _), (of_whole, all_gradients, _) in zip(found, expected, strict=True):
            assert torch.equal(loss, of_whole)
            assert all(torch.equal(value, all_gradients[name]) for name, value in gradients.items())
        (size,) = plan.pipeline.gathered_bytes
        gathered.append(size)
        assert f"a step gathers {bytes_text(size)} of parameters on the devices" in str(plan)
    whole = sum(own.bytes for own in plan.pipeline.gathered)
    assert gathered[0] == whole < gathered[1]  # each once
    assert any(0 < own.kept < own.gaps for own in plan.pipeline.gathered)
    trained(budget=0.0, num_microbatches=1)
    trained(_call, budget=0.5, num_microbatches=3, stages=3, schedule="gpipe")


@pytest.mark.long
def test_sharded_budget(tmp_path: Path) -> None:
    in_processes(2, [check_within_budget], tmp_path)
