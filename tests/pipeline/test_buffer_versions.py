"""What microbatches hand on to the next: buffers and parameters that they update, and Python's own state."""

from __future__ import annotations

import copy
from typing import Any

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
@pytest.mark.quick_every(2)
def test_each_microbatch_reads_what_the_one_before_has_made(schedule: str, devices: list[str]) -> None:
    model = Memory()
    reference, x = copy.deepcopy(model), torch.randn(8, 8)
    compiled = roundpipe_fx.compile(model, devices=devices, num_microbatches=4, loss_reduction="sum", schedule=schedule)
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


class Halved(nn.Module):
    """A parameter is updated by the forward, and then trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layers[2].weight.mul_(0.5)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


@pytest.mark.filterwarnings("ignore:.*more than the .* segments")
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        *((schedule, {"checkpoint": "always"}) for schedule in SCHEDULES),
        ("1f1b", {}),
        ("1f1b", {"memory_budget": 0.0}),
        ("roundpipe", {"memory_budget": 0.0}),
    ],
)
@pytest.mark.quick_every(3)
def test_parameters_that_the_forward_updates(schedule: str, options: dict[str, Any]) -> None:
    initial, x = Halved(), torch.randn(6, 8)
    expected = copy.deepcopy(initial)
    for microbatch in x.chunk(3):
        expected(microbatch).backward()
    for step in (lambda compiled: compiled.forward_backward(x), lambda compiled: compiled(x).backward()):
        model = copy.deepcopy(initial)
        step(
            roundpipe_fx.compile(
                model, devices=CPUS, num_microbatches=3, loss_reduction="sum", schedule=schedule, **options
            )
        )
        for (name, value), own in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(value, own), name
            torch.testing.assert_close(value.grad, own.grad)


class Counting(nn.Module):
    """Counts its calls in Python, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.way, self.calls, self.scale = way, 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.calls += 1
        if self.way == "number":
            x = x * self.calls
        if self.way == "float":
            self.scale *= 0.5
            x = x * self.scale
        if self.way == "branch" and self.calls % 2:
            x = torch.relu(x)
        return x.sum()


@pytest.mark.parametrize(
    ("way", "rows", "microbatches"),
    [("number", 4, 2), ("number", 5, 2), ("number", 8, 3), ("float", 5, 2), ("branch", 4, 2), ("branch", 8, 3)],
)
@pytest.mark.quick_every(6)
def test_what_microbatches_change_in_python_for_the_next_is_refused(way: str, rows: int, microbatches: int) -> None:
    compiled = roundpipe_fx.compile(Counting(way), devices=CPUS, num_microbatches=microbatches)
    x = torch.randn(rows, 8)
    for call in (compiled, compiled.forward_backward, compiled):
        with pytest.raises(RuntimeError, match=r"microbatch \d does not compute what it did .* must be a buffer"):
            call(x)


class Assigned(nn.Module):
    """What one call leaves for the next is a tensor of its own each time."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("memory", torch.zeros(8)) if buffer else setattr(self, "memory", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) + self.memory)
        self.memory = x.detach().mean(0)
        return x.sum()


@pytest.mark.parametrize(("rows", "microbatches", "buffer"), [(4, 2, True), (5, 2, True), (8, 3, True), (5, 2, False)])
@pytest.mark.quick_every(2)
def test_tensors_that_microbatches_assign_for_the_next_are_refused(rows: int, microbatches: int, buffer: bool) -> None:
    compiled = roundpipe_fx.compile(Assigned(buffer), devices=CPUS, num_microbatches=microbatches)
    x = torch.randn(rows, 8)
    for call in (compiled, compiled.forward_backward, compiled):
        with pytest.raises(RuntimeError, match=r"microbatch 1 .* must be a buffer, and be updated in place"):
            call(x)


@pytest.mark.parametrize(("rows", "microbatches"), [(4, 2), (5, 2), (8, 3)])
@pytest.mark.quick_every(3)
def test_what_is_counted_in_python_and_read_by_nobody_is_no_matter(rows: int, microbatches: int) -> None:
    model, x, expected = Counting("unread"), torch.randn(rows, 8), None
    for step in range(3):
        loss = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=microbatches).forward_backward(x)
        expected = loss if expected is None else expected
        assert torch.equal(loss, expected) and model.calls == microbatches * (step + 1)


class Masked(nn.Module):
    """Its first call makes a mask and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = (torch.arange(8) < 5).float()
        for layer in self.layers:
            x = torch.tanh(layer(x) * self.mask)
        return x.sum()


def test_what_the_first_call_makes_and_keeps_is_there_after_a_call_of_the_model() -> None:
    model, x = Masked(), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="must be a buffer"):
        roundpipe_fx.compile(
            copy.deepcopy(model), devices=CPUS, num_microbatches=2, loss_reduction="sum"
        ).forward_backward(x)
    expected = model(x)
    loss = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=2, loss_reduction="sum").forward_backward(x)
    torch.testing.assert_close(loss, expected)
