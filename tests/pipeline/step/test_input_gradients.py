"""Gradients of inputs: each microbatch makes a part, and the batch's gradient is put together from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from tests.pipeline.steps import CPUS, SCHEDULES, Blocks, squares

CALLS = ("forward_backward", "call")


def _step(compiled: Any, x: torch.Tensor, y: torch.Tensor, call: str) -> None:
    if call == "call":
        squares(compiled(x), y).backward()
    else:
        compiled.forward_backward(x, labels=y, loss_fn=squares)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.quick_every(14)
def test_no_step_allocates_more_than_predicted(schedule: str, call: str) -> None:
    for devices in (["cpu"], CPUS):
        model = Blocks(8, 4)
        compiled = roundpipe_fx.compile(
            model, devices=devices, num_microbatches=4, schedule=schedule, memory_budget=0.0, dynamic=False
        )
        for step in range(2):
            x, y = torch.randn(96, 8, requires_grad=True), torch.randn(96, 8, requires_grad=True)
            with roundpipe_fx.measure_peak("cpu") as peak:
                _step(compiled, x, y, call)
            planned = compiled.plan.pipeline
            assert planned is not None
            if step:
                assert peak.bytes <= sum(planned.peak_bytes)
                # A loss outside may stand in memory of the output's size; this one does not.
                loss = x.nbytes if call == "call" else 0
                assert len(devices) == 2 or planned.peak_bytes[0] <= 1.05 * (peak.bytes + loss)
            compiled.zero_grad()


class _Doubles(nn.Module):
    """Writes over what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.linear(x).sin()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_an_input_that_is_written_over(microbatches: int, call: str) -> None:
    model = _Doubles()
    start, y = torch.randn(7, 4), torch.randn(7, 4)
    expected, own = start.clone().requires_grad_(), start.clone().requires_grad_()
    x = expected * 3
    squares(model(x), y).backward()
    compiled = roundpipe_fx.compile(model, num_microbatches=microbatches, loss_reduction="sum")
    written = own * 3
    _step(compiled, written, y, call)
    assert torch.equal(written, x)
    torch.testing.assert_close(own.grad, expected.grad)


class _Both(nn.Module):
    def forward(self, x: torch.Tensor, z: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:
        return (x * 2 + z.sin().mean() + 0 * unread.detach()).cos()


@pytest.mark.parametrize("call", CALLS)
def test_a_tensor_given_twice_one_made_before_and_one_that_nobody_reads(call: str) -> None:
    def of(model: Any, pipelined: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        x, unread = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
        y = torch.randn(6, 4, requires_grad=True)
        seen: list[torch.Tensor] = []
        x.register_hook(seen.append)
        given = x.exp()
        if pipelined:
            if call == "call":
                squares(model(given, given, unread), y).backward()
            else:
                model.forward_backward(given, given, unread, labels=y, loss_fn=squares)
        else:
            for rows in range(0, 6, 2):
                part = given[rows : rows + 2]
                squares(model(part, part, unread), y[rows : rows + 2]).backward(retain_graph=True)
        return [x.grad, unread.grad, y.grad, torch.stack(seen).sum(0)]

    model = _Both()
    expected = of(lambda x, z, _: model(x, z, torch.zeros(())), pipelined=False)
    found = of(roundpipe_fx.compile(model, num_microbatches=3, loss_reduction="sum"), pipelined=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other)


def test_specified_dimensions() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> torch.Tensor:
            return (x + bias).sin().square().sum(0)

    x, bias = torch.randn(3, 6, requires_grad=True), torch.randn(3, 1, requires_grad=True)
    Net()(x, bias=bias).sum().backward()
    expected = x.grad, bias.grad
    x.grad = bias.grad = None
    compiled = roundpipe_fx.compile(
        Net(), num_microbatches=2, loss_reduction="sum", split_input=((1,), {"bias": None}), merge_output=0
    )
    compiled(x, bias=bias).sum().backward()
    for one, other in zip((x.grad, bias.grad), expected, strict=True):
        torch.testing.assert_close(one, other)
