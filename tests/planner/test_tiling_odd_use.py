"""Odd use of steps that only tiles make fit: losses, backwards, modes and hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from tests.planner.tiled import assert_close, check, is_tiled, minimum, step
from tests.planner.tiled_models import MLP, WORDS, Head, assert_near, batch, both, gradients, least

USES: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda loss: (loss * 0.3).backward(),
    "used twice": lambda loss: (loss * loss + loss.exp()).backward(),
    "given a gradient": lambda loss: loss.backward(gradient=torch.tensor(-2.5, dtype=loss.dtype)),
    "given zero": lambda loss: loss.backward(gradient=torch.zeros_like(loss)),
    "with a penalty": lambda loss: (loss + 0.1 * loss.detach() * loss).backward(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.quick_every(3)
def test_a_loss_is_used_in_any_way(use: str) -> None:
    given = batch()
    plain, compiled = both(Head().double(), given)
    for _ in range(2):
        USES[use](plain(**given))
        USES[use](compiled(**given))
    assert is_tiled(compiled)
    assert_near(gradients(compiled), gradients(plain))


@pytest.mark.long
def test_several_losses() -> None:
    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Head(), Head()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"one": self.one(x, y), "other": self.other(x, y)}

    given = batch()

    def backward(losses: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = losses["one"] * 0.3 + losses["other"] * 2
        loss.backward()
        return loss.detach().clone()

    check(Losses().double(), given, backward)


def test_one_of_two_losses_is_not_differentiated() -> None:
    class Losses(Head):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x, y), super().forward(x * 2, y)

    given = batch()
    plain, compiled = both(Losses().double(), given)
    for run in (plain, compiled):
        run(**given)[0].backward()
    assert_near(gradients(compiled), gradients(plain))


def test_gradients_accumulate() -> None:
    model = Head().double()
    batches = [batch(), batch()]
    plain = copy.deepcopy(model)
    # Gradients of the first call are there already in the second, which is none of the step's own.
    compiled = least(model, batches[0])
    for given in batches * 2:
        (plain(**given) / 2).backward()
        (compiled(**given) / 2).backward()
    assert is_tiled(compiled)
    assert_near(gradients(compiled), gradients(plain))


def test_the_backward_twice() -> None:
    given = batch()
    plain, compiled = both(Head().double(), given)
    for run in (plain, compiled):
        loss = run(**given)
        loss.backward(retain_graph=True)
        (loss * 2).backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_near(gradients(compiled), gradients(plain))


def test_two_calls_alive_at_once() -> None:
    batches = [batch(), batch()]
    model = Head().double()
    plain = copy.deepcopy(model)
    (plain(**batches[0]) + plain(**batches[1])).backward()
    compiled = roundpipe_fx.compile(model, memory_budget=4 * minimum(model, batches[0]), tiling="auto")
    for _ in range(2):
        compiled.zero_grad()
        (compiled(**batches[0]) + compiled(**batches[1])).backward()
    assert_near(gradients(compiled), gradients(plain))


def test_a_gradient_scaler() -> None:
    given = batch(dtype=torch.float32)
    plain, compiled = both(Head(), given)
    left = []
    for run in (plain, compiled):
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(run(**given)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(run.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        left.append([p.detach().clone() for p in run.parameters()])
    assert_near(left[1], left[0], 1e-6)


def test_without_gradients() -> None:
    given = batch()
    plain, compiled = both(Head().double(), given)
    with torch.no_grad():
        assert torch.allclose(compiled(**given), plain(**given), rtol=1e-12)
    compiled(**given).backward()
    with torch.inference_mode():
        assert torch.allclose(compiled(**given), plain(**given), rtol=1e-12)
    plain(**given).backward()
    assert_near(gradients(compiled), gradients(plain))


@pytest.mark.long
def test_eval_and_train() -> None:
    given = {"x": torch.randn(64, 8, dtype=torch.float64)}
    plain, compiled = both(MLP(0.3).double(), given)
    for mode in (True, False, True):
        plain.train(mode)
        compiled.train(mode)
        assert_close(step(compiled, compiled, given, seed=3), step(plain, plain, given, seed=3), 1e-12)


@pytest.mark.long
def test_training_goes_on() -> None:
    given = {"x": torch.randn(64, 8, dtype=torch.float64)}
    plain, compiled = both(MLP(0.3).double(), given)
    for run in (plain, compiled):
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(run.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            run(**given).backward()
            optimizer.step()
    for own, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own, other, rtol=1e-9, atol=1e-12)


class WithLogits(Head):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


@pytest.mark.long
def test_logits_that_are_returned() -> None:
    given = batch()
    model = WithLogits().double()
    outcomes = check(model, given, outputs="held")
    assert outcomes[-1].planned >= 64 * WORDS * 8
    compiled = least(copy.deepcopy(model), given)
    assert torch.allclose(compiled(**given)["logits"], model(**given)["logits"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("held", [True, False])
def test_a_plan_counts_logits_that_are_returned_until_the_backward_ends(held: bool) -> None:
    """Or until then, if the caller lets go of them: no kernel needs as much for itself."""
    given = batch()
    model = WithLogits().double()
    options: dict[str, Any] = {"tiling": "never", "outputs": "held" if held else "dropped"}
    compiled = roundpipe_fx.compile(model, memory_budget=minimum(model, given, **options), **options)
    compiled(**given)["loss"].backward()
    model.zero_grad()
    with roundpipe_fx.measure_peak("cpu") as peak:
        outputs = compiled(**given)
        loss = outputs["loss"]
        if not held:
            del outputs
        loss.backward()
    assert peak.bytes == compiled.plan.peak_bytes


@pytest.mark.long
def test_logits_that_are_differentiated() -> None:
    given = batch()

    def backward(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = outputs["loss"] + outputs["logits"].square().mean()
        loss.backward()
        return loss.detach().clone()

    model = WithLogits().double()
    compiled = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=10 * 64 * WORDS * 8)
    backward(compiled(**given))
    backward(compiled(**given))
    budget = compiled.plan.peak_bytes
    check(model, given, backward, asked=[budget], tiles=False)


def test_hooks_on_the_head() -> None:
    given = batch()
    model = Head().double()
    seen: list[float] = []
    plain = copy.deepcopy(model)
    for one in (plain, model):
        one.head.register_forward_hook(lambda module, args, output: output * 1.5)
        one.head.weight.register_hook(lambda gradient: gradient * 2)
        one.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    compiled = least(model, given)
    for run in (plain, compiled):
        run(**given).backward()
    assert is_tiled(compiled)
    assert len(seen) == 2 and abs(seen[0] - seen[1]) < 1e-12 * seen[0]
    assert_near(gradients(compiled), gradients(plain))


def test_tensor_hooks_on_logits() -> None:
    class Hooked(Head):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.head(torch.tanh(self.body(x)))
            logits.register_hook(lambda gradient: gradient * 3)
            return F.cross_entropy(logits, y)

    check(Hooked().double(), batch())


@pytest.mark.filterwarnings("ignore")
def test_backward_hooks_on_the_head() -> None:
    given = batch()
    model = Head().double()
    plain = copy.deepcopy(model)
    for one in (plain, model):
        one.head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    compiled = roundpipe_fx.compile(model, memory_budget=8 * 64 * WORDS * 8, tiling="auto")
    for run in (plain, compiled):
        run(**given).backward()
    assert_near(gradients(compiled), gradients(plain))
