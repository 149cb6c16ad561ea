from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from tests.pipeline.steps import CPUS, assert_close, left_behind


class Normed(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum)
        self.second, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.first(x)))
        return self.norm2(self.second(x)).square().sum((1, 2, 3))


def total(output: torch.Tensor) -> torch.Tensor:
    return (output * output).sum()


def test_by_default_statistics_are_of_microbatches() -> None:
    model, x = Normed(), torch.randn(8, 3, 6, 6)
    own = copy.deepcopy(model)
    loss = sum(total(own(piece)) for piece in x.split(2))
    loss.backward()
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=4, loss_reduction="sum")
    found = left_behind(model, compiled.forward_backward(x, loss_fn=total))
    assert_close(found, left_behind(own, loss), 1e-4)
    for name, buffer in own.named_buffers():
        torch.testing.assert_close(found.buffers[name], buffer)
    assert model.norm1.num_batches_tracked == 4


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_deferred_they_are_of_the_batch(momentum: float | None, checkpoint: str) -> None:
    """The first layer sees what it sees without microbatches, so its statistics are those of a step without."""
    model, x = Normed(momentum), torch.randn(8, 3, 6, 6)
    own, plain = copy.deepcopy(model), copy.deepcopy(model)
    loss = sum(total(own(piece)) for piece in x.split(2))
    loss.backward()
    compiled = roundpipe_fx.compile(
        model, devices=CPUS, num_microbatches=4, loss_reduction="sum", deferred_batch_norm=True, checkpoint=checkpoint
    )
    for _ in range(2):
        model.zero_grad()
        step = left_behind(model, compiled.forward_backward(x, loss_fn=total))
        plain(x)
        assert_close(step, left_behind(own, loss), 1e-4)  # gradients are those of microbatches
        torch.testing.assert_close(model.norm1.running_mean, plain.norm1.running_mean)
        torch.testing.assert_close(model.norm1.running_var, plain.norm1.running_var)
        assert model.norm1.num_batches_tracked == plain.norm1.num_batches_tracked
    assert "forward" not in model.norm1.__dict__
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_deferred_in_eval_and_through_autograd() -> None:
    model, x = Normed(), torch.randn(8, 3, 6, 6)
    plain = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(
        model, devices=CPUS, num_microbatches=4, loss_reduction="sum", deferred_batch_norm=True
    )
    total(compiled(x)).backward()
    plain(x)
    torch.testing.assert_close(model.norm1.running_mean, plain.norm1.running_mean)
    compiled.eval()
    before = copy.deepcopy(model.state_dict())
    torch.testing.assert_close(compiled(x), model(x))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_failed_step_leaves_the_layers_as_they_were() -> None:
    model = Normed()
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=4, deferred_batch_norm=True)
    with pytest.raises(ValueError, match="single number"):
        compiled.forward_backward(torch.randn(8, 3, 6, 6), loss_fn=lambda output: output)
    assert "forward" not in model.norm1.__dict__
    assert model.norm1.num_batches_tracked == 0


class _Twice(nn.Module):
    """A batch norm that is used twice, and whose statistics are read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.out = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(self.norm(self.linear(x)).relu())).relu()
        return self.out(x * self.norm.running_var)


class _Checkpointed(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=not frozen).train(not frozen), nn.ReLU())
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Eager checkpoints update the statistics once more when they recompute.
        inside = torch.compiler.is_compiling()
        return self.out(roundpipe_fx.checkpoint(self.block, x) if inside else self.block(x))


@pytest.mark.parametrize(
    "make",
    [_Twice, _Checkpointed, functools.partial(_Checkpointed, frozen=True)],
    ids=["twice", "checkpointed", "frozen"],
)
@pytest.mark.parametrize(
    "options",
    [{"schedule": "gpipe", "memory_budget": 0.0}, {"schedule": "zero_bubble", "checkpoint": "always"}],
    ids=["budget", "always"],
)
def test_norms_that_are_computed_again(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    reference, x = make(), torch.randn(8, 4)
    piped = copy.deepcopy(reference)
    for rows in x.tensor_split(2):
        reference(rows).square().sum().backward()
    compiled = roundpipe_fx.compile(piped, devices=CPUS, num_microbatches=2, loss_reduction="sum", **options)
    compiled.forward_backward(x, loss_fn=lambda output: output.square().sum())
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(piped.get_buffer(name), buffer)
    for own, other in zip(reference.parameters(), piped.parameters(), strict=True):
        torch.testing.assert_close(other.grad, own.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("options", [{}, {"devices": CPUS}, {"memory_budget": 0.0}])
@pytest.mark.quick_every(4)
def test_cumulative_statistics_are_of_microbatches_too(microbatches: int, options: dict[str, Any]) -> None:
    """The factor is one divided by the number of batches so far: the graph does not break there."""
    model, x = Normed(None), torch.randn(8, 3, 6, 6)
    eager = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(model, num_microbatches=microbatches, loss_reduction="sum", **options)
    for _ in range(2):
        model.zero_grad()
        eager.zero_grad()
        loss = sum(total(eager(piece)) for piece in x.chunk(microbatches))
        loss.backward()
        assert_close(left_behind(model, compiled.forward_backward(x, loss_fn=total)), left_behind(eager, loss), 1e-4)
        torch.testing.assert_close(list(model.buffers()), list(eager.buffers()))
    torch.testing.assert_close(compiled.eval()(x), eager.eval()(x))
    compiled.train()
    compiled(x).sum().backward()
    assert "forward" not in vars(model.norm1)
