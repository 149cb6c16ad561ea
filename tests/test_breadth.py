"""Models of many kinds: the bits of ``aot_eager``, whatever the operations are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.comparison import aot_eager_step, assert_bitwise, compiled_step, train_step


class Between(nn.Module):
    """Some function between two linear layers, which makes both sides of it matter."""

    def __init__(self, function: Callable[[Between, torch.Tensor], torch.Tensor], *extra: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.extra = nn.ModuleList(extra)
        self.register_buffer("average", torch.ones(8))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.function(self, torch.tanh(self.first(x)))).square().sum()


class Doubled(torch.autograd.Function):
    """A backward of its own, which is not the derivative of the forward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * 2


def _noise(model: Between, x: torch.Tensor) -> torch.Tensor:
    x = x * torch.rand(4, 8) + torch.randn_like(x)
    return F.rrelu(x, training=True) + F.dropout(x, 0.5) + torch.rand(8)


def _draws_routes(model: Between, x: torch.Tensor) -> torch.Tensor:
    chosen = torch.multinomial(x.softmax(-1), 1).squeeze(1)
    return model.extra[0](chosen) + F.gumbel_softmax(x, hard=True)


def _recurrent(model: Between, x: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(4, 8)
    for _ in range(4):
        state = model.extra[0](x, state)
    return state


def _updates_buffer(model: Between, x: torch.Tensor) -> torch.Tensor:
    x = x * model.average.clone()
    with torch.no_grad():
        model.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x * model.average


def _views(model: Between, x: torch.Tensor) -> torch.Tensor:
    left, right = x.split(4, dim=1)
    fold_path = x.view(2, 2, 8).transpose(0, 1).reshape(4, 8)
    return torch.cat([right, left], 1) + fold_path[:, ::2].repeat(1, 2) + x.t().contiguous().t()


def _convolution(model: Between, x: torch.Tensor) -> torch.Tensor:
    image = model.extra[1](model.extra[0](x.view(1, 1, 4, 8)))
    return F.max_pool2d(image, 1).sum(1).view(4, 8)


def _lies_otherwise(model: Between, x: torch.Tensor) -> torch.Tensor:
    """The gradient arrives turned at a dropout, before something that relies on strides."""
    x = torch.as_strided(x * 2, (4, 8), (8, 1))
    x = model.extra[1](x).masked_fill(x > 1, 0)
    return model.extra[2](model.extra[0](x.view(2, 2, 8)).transpose(1, 2)).view(4, 8)


def _rotary(model: Between, x: torch.Tensor) -> torch.Tensor:
    """Complex numbers, in a layout in which kernels round otherwise if they write over an operand."""
    x = model.extra[0](x).view(2, 2, 4, 16, 2).permute(0, 3, 1, 2, 4)
    angles = torch.linspace(0, 3, 64).view(1, 16, 1, 4)
    turned = torch.view_as_complex(x) * torch.polar(torch.ones_like(angles), angles)
    return model.extra[1](torch.view_as_real(turned).permute(0, 2, 3, 1, 4).reshape(4, 128))


def _windows(model: Between, x: torch.Tensor) -> torch.Tensor:
    """Windows that overlap, whose gradient gathers by indices that another stage makes (Longformer)."""
    for layer in model.extra:
        x = layer(x.as_strided((4, 7, 2), (8, 1, 1)).reshape(4, 14)).tanh()
    return x


CASES: dict[str, Callable[[], Between]] = {
    "noise": lambda: Between(_noise),
    "drawn routes": lambda: Between(_draws_routes, nn.Embedding(8, 8)),
    "recurrent": lambda: Between(_recurrent, nn.GRUCell(8, 8)),
    "fft": lambda: Between(lambda m, x: torch.fft.irfft(torch.fft.rfft(x).abs() + 0j, n=8)),
    "cond": lambda: Between(lambda m, x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))),
    "checkpoint": lambda: Between(
        lambda m, x: checkpoint(lambda y: F.dropout(m.extra[0](y), 0.5).tanh(), x, use_reentrant=False), nn.Linear(8, 8)
    ),
    "autograd function": lambda: Between(lambda m, x: Doubled.apply(x)),
    "views": lambda: Between(_views),
    "in place": lambda: Between(lambda m, x: x.clone().mul_(2).clamp_(-1, 1).add_(x)),
    "convolution": lambda: Between(
        _convolution, nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    ),
    "attention": lambda: Between(
        lambda m, x: m.extra[0](x[None], x[None], x[None])[0][0], nn.MultiheadAttention(8, 2, dropout=0.2)
    ),
    "complex": lambda: Between(_rotary, nn.Linear(8, 128), nn.Linear(128, 8)),
    "windows": lambda: Between(_windows, *(nn.Linear(14, 8) for _ in range(4))),
    "sorted": lambda: Between(lambda m, x: x.sort(dim=0).values * x.cumsum(0) + x[x.argmax(1) % 4]),
    "double": lambda: Between(lambda m, x: x.double().cumprod(1).float()),
    "no_grad": lambda: Between(lambda m, x: x * x.detach().norm() + torch.where(x > 0, x, x.exp())),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick_every(4)
def test_bitwise_as_aot_eager(name: str) -> None:
    model, batch = CASES[name](), {"x": torch.randn(4, 8)}
    reference = aot_eager_step(model, batch)
    for recompute in ("none", "full"):
        torch._dynamo.reset()
        step, _ = compiled_step(model, batch, stages=2, recompute=recompute)
        assert_bitwise(step, reference)


def test_buffer_that_is_updated_after_it_was_used() -> None:
    """Held against eager: aot_eager copies the buffer again in the backward, when it has changed already."""
    model, batch = Between(_updates_buffer), {"x": torch.randn(4, 8)}
    reference = copy.deepcopy(model)
    expected = train_step(reference, reference, batch)
    for recompute in ("none", "full"):
        torch._dynamo.reset()
        step, _ = compiled_step(model, batch, stages=2, recompute=recompute)
        assert_bitwise(step, expected)


def test_gradient_that_lies_otherwise() -> None:
    """Held against eager: aot_eager fails, since the fake kernel of a dropout's gradient tells other strides."""
    model = Between(_lies_otherwise, nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(2, 2))
    batch = {"x": torch.randn(4, 8)}
    expected = train_step(model, model, batch)
    for options in ({"recompute": "none"}, {"recompute": "full"}, {"memory_budget": 0.0}):
        torch._dynamo.reset()
        step, _ = compiled_step(model, batch, **options)
        assert_bitwise(step, expected)
