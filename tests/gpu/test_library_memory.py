"""Memory that libraries keep for threads and streams: allocated before a step begins, and not again for a new plan."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.budget import default_budget
from roundpipe_fx.runtime.library_memory import expected_library_bytes, library_bytes, touch_libraries
from tests.pipeline.steps import Blocks, squares

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _compiled(model: nn.Module) -> nn.Module:
    return roundpipe_fx.compile(model, memory_budget=0.3, stage_compiler="eager", dynamic=False)


def _in_place(model: nn.Module) -> nn.Module:
    options = {"memory_budget": 0.3, "stage_compiler": "eager"}
    model.compile(backend="roundpipe_fx", options=options, dynamic=False)
    return model


@pytest.mark.parametrize("front_door", [_compiled, _in_place])
def test_a_step_takes_none_of_it_in_whichever_thread_it_runs(front_door: Callable[[nn.Module], nn.Module]) -> None:
    model = front_door(Mlp().cuda())
    x = torch.randn(256, 32, device="cuda")
    peaks = []

    def step() -> None:
        with roundpipe_fx.measure_peak("cuda") as peak:
            model(x).backward()
        peaks.append(peak.bytes)

    for _ in range(3):
        step()
    reserved = torch.cuda.memory_reserved()
    other = threading.Thread(target=step)  # its workspace is allocated as its first step begins
    other.start()
    other.join()
    step()
    (plan,) = roundpipe_fx.plans(model)
    assert plan.library_bytes and "libraries keep" in str(plan)
    assert max(peaks[1:3] + peaks[4:]) <= plan.peak_bytes
    assert torch.cuda.memory_reserved() - reserved <= plan.library_bytes


def test_workers_streams_and_what_libraries_keep_for_them_outlive_a_plan() -> None:
    model = Blocks(32, 4).cuda()
    compiled = roundpipe_fx.compile(model, devices=["cuda:0"], num_microbatches=2, stage_compiler="eager")
    x = torch.randn(64, 32, device="cuda")

    def step() -> int:
        compiled.zero_grad()
        with roundpipe_fx.measure_peak("cuda") as peak:
            compiled.forward_backward(x, labels=x, loss_fn=squares)
        return peak.bytes

    step()
    planned = max(compiled.plan.pipeline.peak_bytes)
    assert compiled.plan.library_bytes
    reserved, threads = torch.cuda.memory_reserved(), threading.active_count()
    for _ in range(3):
        compiled._state_of_roundpipe_fx.compile()
        assert step() <= planned
    assert (torch.cuda.memory_reserved(), threading.active_count()) == (reserved, threads)


def test_a_backward_that_is_to_come_runs_on_the_workers_of_the_next_plan() -> None:
    model = Blocks(32, 2).cuda()
    compiled = roundpipe_fx.compile(model, devices=["cuda:0"], num_microbatches=2, stage_compiler="eager")
    x = torch.randn(64, 32, device="cuda")
    loss = squares(compiled(x), x)
    compiled._state_of_roundpipe_fx.compile()
    loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    squares(compiled(x), x).backward()
    assert all(torch.equal(own.grad, one) for own, one in zip(model.parameters(), expected, strict=True))


def test_the_default_budget_leaves_out_what_is_still_to_come() -> None:
    device = torch.device("cuda:0")
    assert default_budget(device, 1 << 20) <= default_budget(device) - (900 << 10)
    stream = torch.accelerator.current_stream(device)
    known = library_bytes(device)
    worker = threading.Thread(target=lambda: touch_libraries(stream, stream))
    worker.start()
    worker.join()
    assert library_bytes(device) >= known
    assert not library_bytes(device) or not expected_library_bytes(device)
