"""What a forward keeps and does not return: no loss of the step, differentiated as eagerly or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize
from torch import nn
from torch.nn.utils import prune

import roundpipe_fx


class _AttributeLoss(nn.Module):
    """Keeps a loss in an attribute, by ``keep``."""

    def __init__(self, keep: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.first, self.second, self.keep = nn.Linear(2, 3), nn.Linear(3, 1), keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.keep(self, hidden.square().mean())
        return self.second(hidden).sum()


def _in_attribute(self: Any, loss: torch.Tensor) -> None:
    self.extra = loss


def _in_child(self: Any, loss: torch.Tensor) -> None:
    self.second.extra = loss


def _in_dict(self: Any, loss: torch.Tensor) -> None:
    self.extras = {"loss": (loss, 1)}


KEPT: dict[str, tuple[Callable[[Any, torch.Tensor], None], Callable[[Any], torch.Tensor]]] = {
    "extra": (_in_attribute, lambda model: model.extra),
    "second.extra": (_in_child, lambda model: model.second.extra),
    "extras": (_in_dict, lambda model: model.extras["loss"][0]),
}


@pytest.mark.parametrize("name", KEPT)
def test_with_one_microbatch_kept_losses_are_differentiated(name: str) -> None:
    keep, kept = KEPT[name]
    model, x = _AttributeLoss(keep), torch.randn(4, 2)
    compiled = roundpipe_fx.compile(model, num_microbatches=1, devices=["cpu", "cpu"])
    expected = torch.autograd.grad(model(x) + kept(model), [*model.parameters()])
    for _ in range(2):
        model.zero_grad()
        loss = compiled(x) + kept(compiled)
        loss.backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("name", KEPT)
def test_with_several_it_is_told_of_and_refused(name: str) -> None:
    keep, kept = KEPT[name]
    model, x = _AttributeLoss(keep), torch.randn(4, 2)
    compiled = roundpipe_fx.compile(model, num_microbatches=2)
    with pytest.warns(UserWarning, match=rf"keeps '{name}', of 2 microbatches that of the last"):
        output = compiled(x)
    with pytest.raises(RuntimeError, match=rf"'{name}', which the forward keeps.*Return it.*num_microbatches=1"):
        (output + kept(compiled)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(x).backward()  # told of once; what is returned is differentiated


def test_a_kept_output_is_differentiated_too() -> None:
    def keep(self: Any, loss: torch.Tensor) -> None:
        self.losses = [loss]

    class Keeping(_AttributeLoss):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            return self.last

    model, x = Keeping(keep), torch.randn(4, 2)
    compiled = roundpipe_fx.compile(model, num_microbatches=1)
    expected = torch.autograd.grad(model(x) + 2 * model.last + model.losses[0], [*model.parameters()])
    (compiled(x) + 2 * compiled.last + compiled.losses[0]).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_what_a_hook_keeps_outside_the_model() -> None:
    seen: dict[str, torch.Tensor] = {}
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(4, 2)
    model[1].register_forward_hook(lambda module, args, output: seen.update(hidden=output))
    compiled = roundpipe_fx.compile(model, num_microbatches=1)
    expected = torch.autograd.grad(model(x).sum() + seen["hidden"].square().sum(), [*model.parameters()])
    (compiled(x).sum() + seen["hidden"].square().sum()).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    compiled = roundpipe_fx.compile(model, num_microbatches=2)
    loss = compiled.forward_backward(x, loss_fn=lambda output: output.sum())  # no second loss
    assert torch.isfinite(loss)


def _mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize(
    "wrap",
    [
        torch.nn.utils.weight_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
        torch.nn.utils.spectral_norm,
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.filterwarnings("error:roundpipe_fx")
def test_weights_that_hooks_compute(wrap: Any) -> None:
    model = nn.Sequential(wrap(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 1)).eval()  # eval: no power iteration
    x, y = torch.randn(4, 4), torch.randn(4, 1)
    expected = torch.autograd.grad(_mean(model(x), y), [*model.parameters()])
    for run in ("step", "call"):
        compiled = roundpipe_fx.compile(model, num_microbatches=2)
        model.zero_grad()
        if run == "step":
            compiled.forward_backward(x, labels=y, loss_fn=_mean)
        else:
            _mean(compiled(x), y).backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.map = torch.softmax(self.query(x) @ x.transpose(1, 2), -1)
        self.penalty = self.map.square().mean()
        return self.out(self.map @ x).mean()


@pytest.mark.filterwarnings("ignore:roundpipe_fx. the forward keeps")
def test_a_loss_function_may_add_what_the_model_keeps() -> None:
    model, x = _Attention(), torch.randn(4, 3, 4)
    expected = torch.autograd.grad(model(x) + model.penalty, [*model.parameters()])
    for options in ({}, {"return_outputs": True}):
        model.zero_grad()
        compiled = roundpipe_fx.compile(model, num_microbatches=2)
        compiled.forward_backward(x, loss_fn=lambda output: output + model.penalty, **options)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        assert not model.map.requires_grad


def test_outputs_of_the_users_own_classes_are_detached() -> None:
    class Output:
        def __init__(self, loss: torch.Tensor, hidden: torch.Tensor) -> None:
            self.loss, self.hidden = loss, hidden

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return Output(y.square().mean(), y)

    compiled = roundpipe_fx.compile(Net(2, 1), num_microbatches=2, merge_output=lambda outputs: outputs)
    loss, outputs = compiled.forward_backward(torch.randn(4, 2), return_outputs=True)
    assert torch.isfinite(loss) and len(outputs) == 2 and not outputs[0].hidden.requires_grad
