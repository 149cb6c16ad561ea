"""Buffers that each microbatch updates from what the one before has made of them, read and updated far apart."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import roundpipe_fx
from tests.pipeline.steps import CPUS, SCHEDULES


class Memory(nn.Module):
    """What the last layer made is read by the first one in the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.register_buffer("memory", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.memory
        for layer in self.layers:
            x = torch.relu(layer(x))
        self.memory.mul_(0.5).add_(x.detach().mean(0))
        return x.sum()


@pytest.mark.filterwarnings("ignore:.*more than the .* segments")
@pytest.mark.parametrize("devices", [["cpu"], CPUS])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_microbatch_reads_what_the_one_before_has_made(schedule: str, devices: list[str]) -> None:
    model = Memory()
    reference, x = copy.deepcopy(model), torch.randn(8, 8)
    compiled = roundpipe_fx.compile(model, devices=devices, num_microbatches=4, schedule=schedule)
    for _ in range(2):
        compiled.forward_backward(x)
        for microbatch in x.chunk(4):
            reference(microbatch).backward()
    torch.testing.assert_close(model.memory, reference.memory)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_a_schedule_that_would_wait_for_itself_is_an_error() -> None:
    schedule = roundpipe_fx.Schedule.parse("0: F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1")
    compiled = roundpipe_fx.compile(
        Memory(), devices=["cpu"], num_microbatches=2, stages=["layers.3"], schedule=schedule
    )
    with pytest.raises(roundpipe_fx.InvalidScheduleError, match=r"device 0 waits at F0.1 for F1.0"):
        compiled.forward_backward(torch.randn(4, 8))
