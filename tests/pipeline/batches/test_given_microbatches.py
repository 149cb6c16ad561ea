"""Microbatches that the caller has split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.pipeline.batches.microbatch import make_microbatches


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        output = self.linear(x)[:, 0]
        return output if labels is None else (output - labels).square().mean()


def _mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("has_loss_fn", [False, True])
def test_a_step_of_them_is_that_of_the_batch(has_loss_fn: bool) -> None:
    model, x, y = Net(), torch.randn(4, 3), torch.randn(4)
    loss = _mean(model(x), y)
    expected = torch.autograd.grad(loss, [*model.parameters()])
    options: dict[str, Any] = {"loss_fn": _mean} if has_loss_fn else {}
    compiled = roundpipe_fx.compile(model, devices=["cpu", "cpu"], num_microbatches=2)
    given = [{"x": x[:2], "labels": y[:2]}, {"x": x[2:], "labels": y[2:]}]
    assert compiled.trace(microbatches=given, **options).training
    found, outputs = compiled.forward_backward(microbatches=given, return_outputs=True, **options)
    torch.testing.assert_close(found, loss.detach())
    assert outputs.shape == ((4,) if has_loss_fn else ())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    plans = len(compiled.plans)
    fewer = compiled.forward_backward(microbatches=given[:1], **options)
    torch.testing.assert_close(fewer, _mean(model(x[:2]), y[:2]).detach())
    assert len(compiled.plans) == plans


def test_positional_inputs_and_gradients_of_inputs() -> None:
    model = Net()
    parts = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    compiled = roundpipe_fx.compile(model, num_microbatches=2, loss_reduction="sum")
    compiled.forward_backward(microbatches=[(part,) for part in parts], loss_fn=lambda output: output.square().sum())
    for part in parts:
        (expected,) = torch.autograd.grad(model(part).square().sum(), [part])
        torch.testing.assert_close(part.grad, expected)


def test_objects_that_cannot_be_split_can_be_given() -> None:
    class Graph:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    class OfGraphs(nn.Linear):
        def forward(self, graph: Any) -> torch.Tensor:
            return super().forward(graph.x).square().mean()

    model, x = OfGraphs(3, 1), torch.randn(4, 3)
    loss = model(Graph(x))
    compiled = roundpipe_fx.compile(model, num_microbatches=2)
    found = compiled.forward_backward(microbatches=[{"graph": Graph(part)} for part in x.split(2)])
    assert torch.isfinite(found) and torch.isfinite(loss)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], ValueError, "microbatches is empty"),
        ([{}] * 3, ValueError, r"3 microbatches were given.*num_microbatches=3"),
        ({"x": 1}, TypeError, "must be a list"),
        ([torch.ones(2)], TypeError, r"microbatches\[0\] is a Tensor: each must be a dict"),
        ([{"labels": 1}, {}], ValueError, "some microbatches have labels"),
    ],
)
def test_what_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_microbatches(given, 2, True)


def test_they_are_all_that_is_given() -> None:
    compiled = roundpipe_fx.compile(Net(), num_microbatches=2)
    with pytest.raises(TypeError, match="microbatches and other inputs"):
        compiled.forward_backward(torch.ones(2, 3), microbatches=[{"x": torch.ones(2, 3)}])
