"""Files of schedules go to torch.distributed.pipelining and come from there."""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as peer
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

import roundpipe_fx
from roundpipe_fx.schedules import (
    Schedule,
    chain,
    dualpipev,
    gpipe,
    interleaved,
    one_f_one_b,
    validate,
    with_recompute,
    zbv,
    zero_bubble,
)

OURS = [
    gpipe(3, 3, 5),
    one_f_one_b(3, 6, 5),
    interleaved(2, 6, 4),
    zero_bubble(3, 3, 5),
    zbv(3, 6, 5),
    dualpipev(3, 6, 5),
]
THEIRS = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def theirs(path: Path, name: str, devices: int, microbatches: int, **options: Any) -> Schedule:
    order = get_schedule_ops(name, devices, microbatches, 2, **options)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([str(action) if action else "" for action in row] for row in order)
    return Schedule.from_csv(path, name)


@pytest.mark.parametrize("schedule", OURS, ids=lambda schedule: schedule.name)
def test_pytorch_reads_ours(schedule: Schedule, tmp_path: Path) -> None:
    schedule.to_csv(tmp_path / "ours.csv")
    with open(tmp_path / "ours.csv", newline="") as file:
        order = {rank: [peer._Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(file))}
    stages = 1 + max(int(own[:, 1].max()) for own in schedule.orders)
    peer._validate_schedule(order, schedule.devices, stages, schedule.microbatches)
    assert Schedule.from_csv(tmp_path / "ours.csv") == schedule


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("options", [{}, {"add_spacing": True}, {"with_comms": True}], ids=["plain", "ticks", "moves"])
def test_theirs_are_valid(name: str, options: dict[str, bool], tmp_path: Path) -> None:
    schedule = theirs(tmp_path / "theirs.csv", name, 3, 8, **options)
    split = any("W" in str(action) for device in range(3) for action in schedule.actions(device))
    validate(schedule, chain(6, split=split), 8, 3)
    assert (schedule.name, schedule.devices, schedule.microbatches) == (name, 3, 8)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_a_model_runs_by_theirs(name: str, tmp_path: Path) -> None:
    schedule = theirs(tmp_path / "theirs.csv", name, 2, 4)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    eager = nn.Sequential(*layers[:2], nn.Tanh(), layers[2]).double()  # a stage has no parameters, the first no inputs'
    model, x = copy.deepcopy(eager), torch.randn(8, 8, dtype=torch.float64)
    eager(x).square().mean().backward()
    compiled = roundpipe_fx.compile(
        model,
        devices=["cpu", "cpu"],
        stages=["1", "2", "3"],
        num_microbatches=4,
        schedule=schedule,
    )
    compiled.forward_backward(x, labels=torch.zeros_like(x), loss_fn=nn.MSELoss())
    for (label, own), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-12, atol=1e-15, msg=label)


def test_recomputations_are_not_written(tmp_path: Path) -> None:
    plain = one_f_one_b(2, 2, 2)
    with_recompute(plain, chain(2, recompute=True)).to_csv(tmp_path / "file.csv")
    assert Schedule.from_csv(tmp_path / "file.csv") == plain


@pytest.mark.parametrize("cell", ["F0.0", "0F", "0X1", "OVERLAP_F_B"])
def test_cells_that_are_none(cell: str, tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text(f"0F0,{cell}\n")
    with pytest.raises(ValueError, match=r"is not an action of torch.distributed.pipelining, such as 2F0"):
        Schedule.from_csv(tmp_path / "file.csv")
