"""The loss of a batch from those of its microbatches: a training loop that stays as it is keeps its loss."""

from __future__ import annotations

import copy
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.pipeline.batches.microbatch import split_inputs
from tests.pipeline.steps import Blocks, assert_close, left_behind


class Trained(nn.Module):
    """Returns its loss, the mean over rows, beside its output and how many rows there were."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Blocks(depth=2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.body(x)
        return {
            "loss": (output - labels).square().mean(),
            "output": output,
            "rows": torch.ones(len(x), dtype=torch.long).sum(),
        }


def _step(model: nn.Module, call: str, x: torch.Tensor, y: torch.Tensor) -> Any:
    model.zero_grad()
    if call == "forward_backward":
        return left_behind(model, model.forward_backward(x, labels=y, loss_fn=_mean_of_loss))
    loss = model(x, y)["loss"]
    loss.backward()
    return left_behind(model, loss)


def _mean_of_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return (output - labels).square().mean()


@pytest.mark.parametrize("call", ["autograd", "forward_backward"])
@pytest.mark.parametrize(("rows", "count"), [(8, 4), (7, 3), (5, 1)])
def test_the_mean_is_the_loss_without_microbatches(call: str, rows: int, count: int) -> None:
    x, y = torch.randn(rows, 16), torch.randn(rows, 16)
    trained = Trained()
    model = trained.body if call == "forward_backward" else trained
    loss = trained(x, y)["loss"]
    loss.backward()
    expected = left_behind(model, loss)
    compiled = roundpipe_fx.compile(model, num_microbatches=count)
    found = _step(compiled, call, x, y)
    assert_close(found, expected)
    assert "mean of the microbatches' losses" in str(compiled.plan)
    if count == 1:
        assert torch.equal(found.loss, loss.detach())
        assert all(torch.equal(found.gradients[name], own) for name, own in expected.gradients.items())


@pytest.mark.parametrize("call", ["autograd", "forward_backward"])
def test_the_mean_of_a_power_of_two_is_the_sum_scaled(call: str) -> None:
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    model = Blocks(depth=2) if call == "forward_backward" else Trained()
    found = [
        _step(roundpipe_fx.compile(model, num_microbatches=4, loss_reduction=how), call, x, y)
        for how in ("mean", "sum")
    ]
    assert torch.equal(found[0].loss * 4, found[1].loss)
    assert all(torch.equal(own * 4, found[1].gradients[name]) for name, own in found[0].gradients.items())


def test_outputs_beside_the_loss() -> None:
    x, y = torch.randn(6, 16), torch.randn(6, 16)
    model = Trained()
    expected = model(x, y)
    compiled = roundpipe_fx.compile(model, num_microbatches=4)
    for outputs in (compiled(x, y), compiled.eval()(x, y)):
        assert outputs["rows"] == 6 and outputs["output"].shape == (6, 16)
        torch.testing.assert_close(outputs["loss"], expected["loss"])
    model.train()
    loss, outputs = roundpipe_fx.compile(model.body, num_microbatches=4).forward_backward(
        x, labels=y, loss_fn=_mean_of_loss, return_outputs=True
    )
    torch.testing.assert_close(loss, expected["loss"].detach())
    torch.testing.assert_close(outputs, expected["output"])


def test_a_callable_that_splits() -> None:
    x, y = torch.randn(6, 16), torch.randn(6, 16)
    model = Trained()
    expected = model(x, y)["loss"]

    def unequal(args: Any, kwargs: Any, count: int) -> Any:
        return [(own[:1], label[:1]) if first else (own[1:], label[1:]) for first in (1, 0) for own, label in [args]], [
            kwargs
        ] * 2

    compiled = roundpipe_fx.compile(model, num_microbatches=2, split_input=unequal, stages=1)
    torch.testing.assert_close(compiled(x, y)["loss"], expected)


def test_the_plan_keeps_how() -> None:
    model = Blocks(depth=2)
    compiled = roundpipe_fx.compile(model, num_microbatches=2, loss_reduction="sum")
    plan = compiled.trace(torch.randn(4, 16), loss_fn=torch.sum)
    assert "sum of the microbatches' losses" in str(plan)
    assert roundpipe_fx.Plan.from_json(plan.to_json()).pipeline.loss_reduction == "sum"
    assert copy.deepcopy(compiled).trace(torch.randn(4, 16), loss_fn=torch.sum).pipeline.loss_reduction == "sum"
    with pytest.raises(ValueError, match="valid values are 'mean', 'sum'"):
        roundpipe_fx.compile(model, num_microbatches=2, loss_reduction="max")
    with pytest.raises(ValueError, match="require microbatches"):
        roundpipe_fx.compile(model, loss_reduction="sum")


def test_inputs_that_are_not_of_the_batchs_size_are_the_same_for_each() -> None:
    x, table, positions = torch.randn(6, 4), torch.randn(4, 4), torch.randn(1, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pieces = split_inputs((x,), {"labels": x + 1, "table": table, "positions": positions}, 2)
    for (own,), kwargs in pieces:
        assert len(own) == len(kwargs["labels"]) == 3
        assert kwargs["table"] is table and kwargs["positions"] is positions
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert split_inputs((positions, x), {}, 2)[0][0][0] is positions
    with pytest.warns(UserWarning, match=r"args\[0\] has 6 rows and args\[1\] 4; the first is taken to be the batch"):
        assert split_inputs((x, table), {}, 2)[0][0][1] is table
    with pytest.raises(ValueError, match=r"batch sizes differ: args\[0\] has 6, args\[1\] has 4"):
        split_inputs((x, table), {"other": table}, 2)


def test_a_step_with_an_input_that_is_the_same_for_each() -> None:
    class Scaled(Blocks):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) * scale).square().mean()

    model, x = Scaled(depth=2), torch.randn(8, 16)
    scale = torch.randn(1, 16, requires_grad=True)
    loss = model(x, scale)
    loss.backward()
    expected, gradient = left_behind(model, loss), scale.grad
    model.zero_grad()
    scale.grad = None
    loss = roundpipe_fx.compile(model, num_microbatches=4)(x, scale)
    loss.backward()
    assert_close(left_behind(model, loss), expected)
    torch.testing.assert_close(scale.grad, gradient)


class Output(NamedTuple):
    """Of a model that computes its loss."""

    loss: torch.Tensor


class Counting(nn.Module):
    """Is given the number of what counts in the batch, as by Hugging Face's Trainer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.body, self.way = Blocks(depth=2), way

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Output:
        output = self.body(x)
        if self.way == "looks at it" and kwargs.get("num_items_in_batch") is not None:
            output = output * 1.0
        if self.way == "passes it on":
            kwargs = {name: value for name, value in kwargs.items() if value is not None}
        losses = (output - labels).square()
        return Output(losses.sum() / kwargs["num_items_in_batch"] if self.way == "divides" else losses.mean())


@pytest.mark.parametrize("way", ["ignores it", "looks at it", "passes it on", "divides"])
@pytest.mark.parametrize("kind", [torch.tensor, int])
@pytest.mark.parametrize("call", ["autograd", "forward_backward"])
@pytest.mark.quick_every(9)
def test_a_count_matters_where_it_is_read(way: str, kind: Any, call: str) -> None:
    """Whatever the model does with it, losses and gradients are those without microbatches."""
    model = Counting(way)
    compiled = roundpipe_fx.compile(copy.deepcopy(model), num_microbatches=4)
    for rows, count in ((8, 1), (8, 128), (12, 100), (8, None)):
        if count is None and way == "divides":
            continue
        x, y = torch.randn(rows, 16), torch.randn(rows, 16)
        given = None if count is None else kind(count)
        model.zero_grad(), compiled.zero_grad()
        loss = model(x, y, num_items_in_batch=given).loss
        loss.backward()
        if call == "autograd":
            found = compiled(x, y, num_items_in_batch=given).loss
            found.backward()
        else:
            found = compiled.forward_backward(x, labels=y, num_items_in_batch=given)
        assert_close(left_behind(compiled, found), left_behind(model, loss))
    assert compiled.plan.pipeline is not None
    assert compiled.plan.pipeline.loss_reduction == ("sum" if way == "divides" else "mean")


def test_a_sum_stays_one_where_a_count_is_not_read() -> None:
    model = Counting("ignores it")
    compiled = roundpipe_fx.compile(copy.deepcopy(model), num_microbatches=4, loss_reduction="sum")
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    found = compiled(x, y, num_items_in_batch=torch.tensor(128)).loss
    torch.testing.assert_close(found, 4 * model(x, y).loss)
