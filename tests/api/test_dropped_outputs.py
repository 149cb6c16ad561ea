"""Outputs that the caller drops before the backward are not planned as held; those that it holds are."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import roundpipe_fx
from roundpipe_fx.budget import InfeasibleBudgetError
from roundpipe_fx.remat.learned_steps import StepBudgetWarning
from roundpipe_fx.runtime.dropped_outputs import DroppedOutputs

_WORDS, _TOKENS = 4096, 256
_SCORES = 4 * _WORDS * _TOKENS


class _Head(nn.Module):
    """A few layers and a loss over many classes; returns the loss and its scores."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))
        self.head = nn.Linear(width, _WORDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(self.layers(x))
        return F.cross_entropy(scores, y), scores


def _made(depth: int = 3, width: int = 32) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return _Head(depth, width), torch.randn(_TOKENS, width), torch.randint(_WORDS, (_TOKENS,))


def _drop(model: Any, *batch: Any) -> None:
    model(*batch)[0].backward()


def _hold(model: Any, *batch: Any) -> Any:
    loss, scores = model(*batch)
    loss.backward()
    return scores


def _hold_a_view(model: Any, *batch: Any) -> Any:
    loss, scores = model(*batch)
    first = scores.detach()[:1]
    del scores
    loss.backward()
    return first


def _peak(step: Callable[..., Any], own: nn.Module, *call: Any) -> int:
    own.zero_grad(set_to_none=True)
    with roundpipe_fx.measure_peak("cpu") as peak:
        step(*call)
    return peak.bytes


@pytest.mark.parametrize("budget", [None, 0.5, 0.0])
@pytest.mark.parametrize(("step", "dropped"), [(_drop, _SCORES), (_hold, 0), (_hold_a_view, 0)])
def test_plans_count_what_is_held(budget: float | None, step: Callable[..., Any], dropped: int) -> None:
    own, *batch = _made()
    model = roundpipe_fx.compile(own, memory_budget=budget)
    _peak(step, own, model, *batch)
    measured = _peak(step, own, model, *batch)
    assert model.plan.dropped_bytes == dropped
    assert measured == model.plan.peak_bytes
    assert len(model.plans) == 1 + (budget == 0.0 and bool(dropped))


@pytest.mark.parametrize("cached", [False, True])
def test_a_budget_that_only_dropped_outputs_meet_is_planned_for(
    cached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROUNDPIPE_FX_CACHE", str(tmp_path))
    monkeypatch.setenv("ROUNDPIPE_FX_PLAN_CACHE", str(int(cached)))
    own, *batch = _made()
    least = {}
    for outputs in ("held", "auto"):
        model = roundpipe_fx.compile(own, memory_budget=1, outputs=outputs, tiling="never")
        with pytest.raises(InfeasibleBudgetError) as refused:
            model(*batch)
        least[outputs] = refused.value.minimum
    assert least["held"] - least["auto"] == _SCORES
    model = roundpipe_fx.compile(own, memory_budget=least["auto"], tiling="never")
    assert _peak(_drop, own, model, *batch) == least["auto"]
    assert f"the caller drops {_SCORES / 2**20:.1f} MiB" in str(model.plan)
    with pytest.warns(StepBudgetWarning, match=f"holds {_SCORES} bytes .* The next step is planned for that"):
        _hold(model, *batch)
    with pytest.raises(InfeasibleBudgetError, match=f"The caller holds {_SCORES} bytes"):
        _hold(model, *batch)
    with pytest.raises(InfeasibleBudgetError, match="loss = model"):
        _drop(model, *batch)  # it may be held again


def test_a_step_recomputes_less_once_outputs_are_known_to_be_dropped() -> None:
    own, *batch = _made(depth=8, width=256)
    kept = roundpipe_fx.compile(own, outputs="held")
    _drop(kept, *batch)
    budget = kept.plan.peak_bytes - _SCORES // 2
    model = roundpipe_fx.compile(own, memory_budget=budget, tiling="never")
    _drop(model, *batch)
    first = model.plan
    assert _peak(_drop, own, model, *batch) <= budget
    assert model.plan.recompute_seconds < first.recompute_seconds
    assert first.dropped_bytes == 0 and model.plan.dropped_bytes == _SCORES
    _hold(model, *batch)
    assert _peak(_hold, own, model, *batch) <= budget
    assert model.plan.dropped_bytes == 0


def test_behind_torch_compile_the_option_says_it() -> None:
    own, *batch = _made()
    known = roundpipe_fx.compile(own, outputs="dropped", memory_budget=0.0)
    _drop(known, *batch)
    budget = known.plan.peak_bytes
    torch._dynamo.reset()
    options = {"memory_budget": budget, "outputs": "dropped", "tiling": "never"}
    compiled = torch.compile(own, backend="roundpipe_fx", options=options)
    assert _peak(_drop, own, compiled, *batch) == budget
    with pytest.warns(StepBudgetWarning, match="planned as dropped .* plans for that"):
        _hold(compiled, *batch)


@pytest.mark.parametrize("outputs", ["auto", "dropped"])
@pytest.mark.long
def test_outputs_that_are_held_are_right(outputs: Any) -> None:
    """Saved scores that the caller holds are not written over, whatever the plan assumes."""
    own, *batch = _made()
    with torch.no_grad():
        expected = own(*batch)[1]
    for compiler in ("eager", "inductor"):
        model = roundpipe_fx.compile(own, memory_budget=0.0, outputs=outputs, stage_compiler=compiler)
        for step in (_drop, _hold, _hold):
            own.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", StepBudgetWarning)
                scores = step(model, *batch)
            gradients = [parameter.grad for parameter in own.parameters()]
            own.zero_grad()
            _drop(own, *batch)
            for gradient, parameter in zip(gradients, own.parameters(), strict=True):
                torch.testing.assert_close(gradient, parameter.grad)
            if scores is not None:
                torch.testing.assert_close(scores, expected)


def test_two_backwards_of_one_call() -> None:
    own, *batch = _made()
    model = roundpipe_fx.compile(own, memory_budget=0.0)

    def twice(model: Any) -> None:
        loss = model(*batch)[0]
        loss.backward(retain_graph=True)
        loss.backward()

    for _ in range(3):
        measured = _peak(twice, own, model)
    assert measured <= model.plan.peak_bytes


def test_a_call_whose_outputs_are_held_beside_one_whose_are_dropped() -> None:
    own, *batch = _made()
    model = roundpipe_fx.compile(own, memory_budget=1.0)

    def both(model: Any) -> None:
        loss, scores = model(*batch)
        other = model(*batch)[0]
        (loss + other).backward()
        del scores

    for _ in range(3):
        measured = _peak(both, own, model)
    assert model.plan.dropped_bytes == 0
    assert measured <= model.plan.peak_bytes


@pytest.mark.long
def test_an_unmodified_training_loop(tmp_path: Any) -> None:
    """Trainer takes the loss alone."""
    config = transformers.GPT2Config(vocab_size=_WORDS, n_layer=1, n_embd=32, n_head=2, use_cache=False)
    own = transformers.GPT2LMHeadModel(config)
    model = roundpipe_fx.compile(own, memory_budget=0.0)
    tokens = torch.arange(64) % _WORDS
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no"
    )
    data = [{"input_ids": tokens, "labels": tokens}] * 8
    transformers.Trainer(model, arguments, train_dataset=data).train()
    assert model.plan.dropped_bytes == 4 * 2 * 64 * _WORDS


def test_outputs_that_were_held_are_not_assumed_dropped_by_a_later_plan() -> None:
    own, *batch = _made()
    held = roundpipe_fx.compile(own, outputs="held", memory_budget=0.0)
    _hold(held, *batch)
    model = roundpipe_fx.compile(own, memory_budget=held.plan.peak_bytes, tiling="never")
    _hold(model, *batch)
    model._state_of_roundpipe_fx.learned.share = 0.5  # as if memory had run out
    model._state_of_roundpipe_fx.compile()
    with pytest.raises(InfeasibleBudgetError, match=f"The caller holds {_SCORES} bytes"):
        _hold(model, *batch)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.long
def test_sizes_that_vary(compiler: Any) -> None:
    own, x, y = _made()
    model = roundpipe_fx.compile(own, memory_budget=0.0, dynamic=True, stage_compiler=compiler)
    for rows in (_TOKENS, _TOKENS // 2, _TOKENS // 2):
        measured = _peak(_drop, own, model, x[:rows], y[:rows])
    assert model.plan.dropped_bytes >= _SCORES // 2
    assert measured <= model.plan.peak_bytes
    scores = _hold(model, x[:rows], y[:rows])
    torch.testing.assert_close(scores, own(x[:rows], y[:rows])[1])


@pytest.mark.parametrize("budget", [1 << 30, 0.5])
@pytest.mark.long
def test_the_frontier_is_that_of_dropped_outputs(budget: float) -> None:
    model, *batch = _made()
    compiled = roundpipe_fx.compile(model, memory_budget=budget)
    compiled.trace(*batch)
    held = compiled.plan.frontier()
    _drop(compiled, *batch)
    plan = compiled.plan
    assert plan.dropped_bytes == _SCORES
    points = plan.frontier()
    assert plan.point() in points
    assert all(more[0] > less[0] and more[1] < less[1] for more, less in itertools.pairwise(points))
    torch._dynamo.reset()
    known = roundpipe_fx.compile(model, memory_budget=budget, outputs="dropped").trace(*batch)
    # Between the ends, other schedules may be looked at.
    assert (points[0], points[-1]) == (known.frontier()[0], known.frontier()[-1])
    assert points[-1][0] < held[-1][0]
    assert roundpipe_fx.Plan.from_json(plan.to_json()).frontier() == points


def test_in_place() -> None:
    own, *batch = _made()
    own.compile(backend="roundpipe_fx", options={"memory_budget": 1.0})
    measured = [_peak(_drop, own, own, *batch) for _ in range(2)][-1]
    (plan,) = roundpipe_fx.plans(own)
    assert plan.dropped_bytes == _SCORES and measured == plan.peak_bytes


@pytest.mark.long
def test_scores_that_are_dropped_and_computed_again_are_no_excess_of_compiled_stages() -> None:
    """A cap on scores is computed again, so the backward reads nothing that the forward returned."""

    class Capped(_Head):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = 30 * torch.tanh(self.head(self.layers(x)) / 30)
            return F.cross_entropy(scores, y), scores

    _, *batch = _made()
    own = Capped(3, 32)
    model = roundpipe_fx.compile(own, memory_budget=0.0, stage_compiler="inductor")
    measured = [_peak(_drop, own, model, *batch) for _ in range(4)][-1]
    assert model.plan.dropped_bytes == _SCORES and len(model.plans) == 2
    assert measured <= model.plan.peak_bytes <= min(model.plan.budget, 1.01 * measured)


class _Returning(_Head):
    """Returns its input beside the loss."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x, y)[0], x.view(-1)


def test_inputs_that_are_returned_are_nobodys_to_drop() -> None:
    torch.manual_seed(0)
    own, x, y = _Returning(3, 32), torch.randn(_TOKENS, 32), torch.randint(_WORDS, (_TOKENS,))
    model = roundpipe_fx.compile(own, memory_budget=0.0, outputs="dropped")
    with warnings.catch_warnings():
        warnings.simplefilter("error", StepBudgetWarning)
        measured = [_peak(_hold, own, model, x, y) for _ in range(2)]
    assert model.plan.dropped_bytes == 0 and len(model.plans) == 1
    assert measured == [model.plan.peak_bytes] * 2


def test_outputs_of_many_calls_are_not_forgotten() -> None:
    """The first call holds its outputs; those of many others, which never go backward, are dropped."""
    seen: list[frozenset[int]] = []
    outputs = DroppedOutputs([0], {}, seen.append)
    forward, backward = outputs.forward(lambda _: (torch.ones(3),)), outputs.backward(lambda _: ())
    (kept,) = forward([])
    for _ in range(200):
        forward([])
    backward([])
    del kept
    forward([])
    backward([])
    assert seen == [frozenset([0]), frozenset()]
