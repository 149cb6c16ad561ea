"""Schedules with the choice of one for the segment where operations peak, and those of another for the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from roundpipe_fx.planner import judged_by_code
from roundpipe_fx.planner.crossed_schedules import cross_at_peak
from roundpipe_fx.remat.choose import Chosen
from roundpipe_fx.remat.schedule import RematChoice

_WORDS, _WIDTH, _TOKENS = 8192, 32, 256


class Capped(nn.Module):
    """A language model whose scores are capped, as those of Gemma 2: the backward reads two values of their size."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, 16 * _WIDTH), nn.GELU(), nn.Linear(16 * _WIDTH, _WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.cap = cap

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.cap * torch.tanh(self.head(x) / self.cap), words)


def _words() -> torch.Tensor:
    return torch.randint(_WORDS, (_TOKENS,), generator=torch.Generator().manual_seed(0))


@pytest.mark.long
def test_a_head_is_not_recomputed_where_its_kernels_need_no_more() -> None:
    """The least that is reached is the scores, over which their gradient is written, and the gradients of weights."""
    torch.manual_seed(0)
    model, words = Capped(30.0), _words()
    compiled = roundpipe_fx.compile(model, memory_budget=0.0, stage_compiler="inductor")
    for _ in range(2):
        compiled.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            compiled(words).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    scores = 4 * _WORDS * _TOKENS
    weights = 4 * _WORDS * _WIDTH
    assert peak.bytes <= compiled.plan.peak_bytes <= 1.1 * (scores + weights)

    exact = Capped(30.0).double()
    exact.load_state_dict(model.state_dict())
    exact(words).backward()
    for gradient, parameter in zip(gradients, exact.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad.float(), rtol=1e-4, atol=1e-8)


def _crossed(
    monkeypatch: pytest.MonkeyPatch, estimate: Callable[[Sequence[Chosen], Chosen], int]
) -> tuple[Sequence[Chosen], Sequence[Chosen]]:
    """The schedules of the model, and what becomes of them if they are estimated so."""
    seen: list[tuple[Sequence[Chosen], Sequence[Chosen]]] = []

    def see(plans: Sequence[Chosen], _: Callable[[Chosen], int]) -> list[Chosen]:
        crossed = cross_at_peak(plans, lambda plan: estimate(plans, plan))
        seen.append((plans, crossed))
        return list(plans)

    monkeypatch.setattr(judged_by_code, "cross_at_peak", see)
    roundpipe_fx.compile(Capped(30.0), memory_budget=0.0, stage_compiler="inductor").trace(_words())
    ((plans, crossed),) = seen
    return plans, crossed


def _kept(plan: Chosen, segment: int, inside: bool) -> set[int]:
    of, kept = plan.graph.segment_of, plan.candidate.schedule.choice.kept
    return {storage for storage in kept if (of[storage] == segment) == inside}


@pytest.mark.long
def test_the_last_schedule_gets_the_choice_of_an_earlier_one_where_operations_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans, crossed = _crossed(monkeypatch, lambda plans, plan: 2 if plan is plans[-1] else 1)
    segment, last = plans[0].candidate.peak.segment, crossed[-1]
    assert last not in plans
    assert _kept(last, segment, inside=True) == _kept(plans[0], segment, inside=True)
    assert _kept(last, segment, inside=True) != _kept(plans[-1], segment, inside=True)
    assert _kept(last, segment, inside=False) == _kept(plans[-1], segment, inside=False)
    seconds = [plan.candidate.seconds for plan in crossed]
    assert seconds == sorted(seconds) and seconds[-1] < plans[-1].candidate.seconds


def test_a_schedule_that_follows_other_operations_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its storages have other numbers than those of the graph that plans are searched for."""
    plans, _ = _crossed(monkeypatch, lambda plans, plan: 1)
    first = plans[0]
    of_others = dataclasses.replace(first.candidate.schedule, choice=RematChoice(frozenset({10**6})))
    candidate = dataclasses.replace(first.candidate, schedule=of_others)
    first = dataclasses.replace(first, candidate=candidate, followed=dataclasses.replace(first.graph))
    crossed = cross_at_peak([first, *plans[1:]], lambda plan: 2 if plan is plans[-1] else 1)
    segment, graph = first.candidate.peak.segment, first.graph
    made = {storage for storage in graph.makers if graph.segment_of[storage] == segment}
    assert _kept(crossed[-1], segment, inside=True) == _kept(plans[0], segment, inside=True) <= made


def test_schedules_stay_where_crossed_ones_are_not_estimated_to_need_less(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, crossed = _crossed(monkeypatch, lambda plans, plan: 1)
    assert all(one is other for one, other in zip(plans, crossed, strict=True))
