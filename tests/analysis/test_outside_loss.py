"""A budget holds for the step, with a loss that the caller computes from the model's outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx


class Words(nn.Module):
    """Logits over many words: what is outside is more than what is inside."""

    def __init__(self, words: int = 400) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, 16), nn.Linear(16, words)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens)))


class WithLoss(Words):
    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = super().forward(tokens)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


def _cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross entropy": _cross_entropy,
    "mean squares": lambda logits, tokens: F.mse_loss(logits, torch.zeros(()).expand_as(logits)),
    "absolute values": lambda logits, tokens: logits.abs().mean(),
    "sum": lambda logits, tokens: logits.sum(),
}


def _peak_of_step(compiled: nn.Module, loss: Callable[..., torch.Tensor]) -> int:
    tokens = torch.randint(400, (4, 32))
    compiled.zero_grad()
    with roundpipe_fx.measure_peak() as peak:
        logits = compiled(tokens)
        loss(logits, tokens).backward()
    return peak.bytes


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_step_stays_within_the_budget(budget: float) -> None:
    compiled = roundpipe_fx.compile(Words(), memory_budget=budget, fullgraph=True)
    measured = {name: max(_peak_of_step(compiled, loss) for _ in range(2)) for name, loss in LOSSES.items()}
    assert max(measured.values()) <= compiled.plan.peak_bytes <= compiled.plan.budget
    assert compiled.plan.peak_bytes <= 1.001 * measured["cross entropy"]
    assert compiled.plan.peak.call == "the caller"
    assert "in the caller at loss" in str(compiled.plan)
    assert len(compiled.plans) == 1


def test_budget_in_bytes() -> None:
    highest = roundpipe_fx.plan(Words(), torch.randint(400, (4, 32)), memory_budget=1.0, device="cpu").peak_bytes
    lowest = roundpipe_fx.plan(Words(), torch.randint(400, (4, 32)), memory_budget=0.0, device="cpu").peak_bytes
    budget = (lowest + highest) // 2
    compiled = roundpipe_fx.compile(Words(), memory_budget=budget, fullgraph=True)
    assert _peak_of_step(compiled, _cross_entropy) <= budget < highest
    assert compiled.plan.recompute_seconds > 0


def test_room_is_left_where_a_loss_is_outside_alone() -> None:
    tokens = torch.randint(400, (4, 32))
    inside = roundpipe_fx.plan(WithLoss(), tokens, memory_budget=0.0, device="cpu")
    outside = roundpipe_fx.plan(Words(), tokens, memory_budget=0.0, device="cpu")
    assert inside.operations is not None and inside.operations.loss == inside.operations.loss_lasts == 0
    assert outside.operations is not None and outside.operations.loss == 3 * 4 * 32 * 400 * 4 + 16


def test_refusal_says_that_the_loss_binds() -> None:
    compiled = roundpipe_fx.compile(Words(), memory_budget=500_000, fullgraph=True)
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError, match="while a loss is computed outside the model"):
        compiled(torch.randint(400, (4, 32)))


class Points(nn.Module):
    """As wide at its end as inside."""

    def __init__(self, out: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
        self.last = nn.Linear(32, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x))


SQUARES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "written out": lambda found, target: ((found - target) ** 2).mean(),
    "of the output": lambda found, target: found.square().mean(),
    "sum": lambda found, target: (found - target).square().sum(),
    "mse_loss": nn.functional.mse_loss,
}


@pytest.mark.parametrize("out", [1, 32])
@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_squared_errors(budget: float, out: int) -> None:
    compiled = roundpipe_fx.compile(Points(out), memory_budget=budget, fullgraph=True)
    x, y = torch.randn(64, 32), torch.randn(64, out)
    for name, squares in SQUARES.items():
        for _ in range(2):
            compiled.zero_grad()
            with roundpipe_fx.measure_peak() as peak:
                output = compiled(x)
                squares(output, y).backward()
            assert peak.bytes <= compiled.plan.peak_bytes <= compiled.plan.budget, name
            assert name != "written out" or out == 1 or compiled.plan.peak_bytes <= 1.01 * peak.bytes


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_under_autocast_losses_compute_with_four_bytes_a_number(budget: float) -> None:
    words = Words(), torch.randint(400, (4, 32)), _cross_entropy
    points = Points(), torch.randn(64, 32), lambda found, _: SQUARES["written out"](found, torch.zeros(64, 32))
    for model, given, loss in (words, points):
        compiled = roundpipe_fx.compile(model, memory_budget=budget, fullgraph=True)
        for _ in range(2):
            compiled.zero_grad()
            with roundpipe_fx.measure_peak() as peak:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    output = compiled(given)
                    assert output.dtype is torch.bfloat16 or model is points[0]
                    found = loss(output, given)
                found.backward()
            assert peak.bytes <= compiled.plan.peak_bytes <= compiled.plan.budget


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_what_is_differentiated_beside_the_loss_is_learned(budget: float) -> None:
    compiled = roundpipe_fx.compile(WithLoss(), memory_budget=budget, fullgraph=True)

    def step(beside: bool) -> int:
        tokens = torch.randint(400, (4, 32))
        compiled.zero_grad()
        with roundpipe_fx.measure_peak() as peak:
            loss, logits = compiled(tokens)
            if beside:
                loss = loss + (logits**2).mean()
            loss.backward()
        return peak.bytes

    step(False)
    known = compiled.plan.peak_bytes
    step(True)
    assert step(True) <= compiled.plan.budget
    assert compiled.plan.peak_bytes > known


def test_room_is_left_for_adding_several_numbers() -> None:
    class TwoLosses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.one(x).square().mean(), self.other(x).abs().sum()

    compiled = roundpipe_fx.compile(TwoLosses(), memory_budget=0.0)
    for _ in range(2):
        compiled.zero_grad()
        with roundpipe_fx.measure_peak() as peak:
            one, other = compiled(torch.ones(1, 2))
            (one * 0.5 + 0.1 * other).backward()
    assert peak.bytes <= compiled.plan.budget


def test_looking_at_the_generator_takes_no_memory() -> None:
    compiled = roundpipe_fx.compile(nn.Linear(2, 2), memory_budget=0.0)
    compiled(torch.ones(1, 2)).sum().backward()
    with roundpipe_fx.measure_peak() as peak:
        compiled(torch.ones(1, 2)).sum().backward()
    assert peak.bytes <= compiled.plan.budget < torch.get_rng_state().nbytes


@pytest.mark.parametrize("view", [lambda x: x[:, 0], lambda x: x.transpose(0, 1)])
def test_gradients_of_returned_views_of_inputs_are_counted(view) -> None:
    """Autograd differentiates a returned view of an input by itself, and adds that gradient to the graph's."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x @ self.weight, view(x)

    model = roundpipe_fx.compile(Net(), memory_budget=0.0)
    for _ in range(2):
        x = torch.randn(50, 64, requires_grad=True)
        with roundpipe_fx.measure_peak("cpu") as peak:
            first, second = model(x)
            (first.sum() + second.sum()).backward()
    assert peak.bytes <= model.plan.peak_bytes


class Expanded(nn.Module):
    """Returns two views of one value, which are larger than it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.layer(x))[:, None]
        return hidden.expand(-1, 7, -1), hidden.expand(-1, 5, -1)


def test_losses_of_expanded_outputs_are_as_large_as_these() -> None:
    compiled = roundpipe_fx.compile(Expanded(), memory_budget=1.0)
    x, targets = torch.randn(32, 16), (torch.zeros(32, 7, 16), torch.zeros(32, 5, 16))
    for _ in range(2):
        with roundpipe_fx.measure_peak("cpu") as peak:
            sum(((y - target) ** 2).mean() for y, target in zip(compiled(x), targets, strict=True)).backward()
    assert 24 * x.nbytes < peak.bytes <= compiled.plan.peak_bytes
