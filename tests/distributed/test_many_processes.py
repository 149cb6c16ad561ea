"""Pipelines over processes: the results of one process's pipeline, and each rank with the parameters of its stages."""

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

import roundpipe_fx
from tests.distributed.models import MODELS, make
from tests.trainers.processes import Check, in_processes

STEPS = 2


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))


def _steps(model: Any, batch: dict[str, Any], count: int = STEPS) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [model.forward_backward(**batch) for _ in range(count)]


def _in_one_process(model: nn.Module, **options: Any) -> Any:
    return roundpipe_fx.compile(model, devices=["cpu"] * dist.get_world_size(), **options)


def _memory(model: nn.Module) -> int:
    return sum(value.untyped_storage().nbytes() for value in (*model.parameters(), *model.buffers()))


def _check_equal(name: str, **options: Any) -> None:
    """Losses, gradients and buffers of two steps are bitwise those of one process; memory is that of own stages."""
    model, batch = make(name)
    plain = copy.deepcopy(model)
    losses = _steps(_in_one_process(plain, **options), batch)
    after = torch.get_rng_state()
    compiled = roundpipe_fx.compile(model, mesh=_mesh(), **options)
    assert all(map(torch.equal, _steps(compiled, batch), losses))
    assert torch.equal(torch.get_rng_state(), after)
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    owned = {**dict(compiled.named_parameters()), **dict(compiled.named_buffers())}
    assert 0 < len(owned) < len(expected)
    for key, value in owned.items():
        assert torch.equal(value, expected[key]), key
        if expected[key].grad is not None:
            assert torch.equal(value.grad, expected[key].grad), (name, options, key, (value.grad-expected[key].grad).abs().max(), expected[key].grad.abs().max())
    assert _memory(model) == sum(value.untyped_storage().nbytes() for value in owned.values())
    assert all(value.grad is None for name, value in model.named_parameters() if name not in owned)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, list(owned))
    assert set().union(*everywhere) == expected.keys()


def check_models(_rank: int, _folder: str) -> None:
    for name in MODELS:
        for microbatches in (1, 4):
            _check_equal(name, num_microbatches=microbatches)


SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "interleaved"},
    {"schedule": "zero_bubble"},
    {"schedule": "zero_bubble", "memory_budget": 0.5},
    {"checkpoint": "except_last"},
    {"memory_budget": 0.0},
]


def check_schedules(_rank: int, _folder: str) -> None:
    for options in SCHEDULES:
        for name in ("net", "tied"):
            _check_equal(name, num_microbatches=2 * dist.get_world_size(), **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "checks"),
    [(2, [check_models]), (3, [check_schedules])],
    ids=["models", "schedules"],
)
def test_equal_to_one_process(ranks: int, checks: Sequence[Check], tmp_path: Path) -> None:
    in_processes(ranks, checks, tmp_path)
